"""Where a result comes from: versions, machine, commit. Written beside every number that leaves the program."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of `packages`, after Python's and mxrl's; those not installed are left out."""
    found = {"python": platform.python_version(), "mxrl": _version("mxrl") or _source_version()}
    return found | {p: v for p in packages if (v := _version(p))}


def commit() -> str | None:
    """The commit of mxrl's source, with `+dirty` for uncommitted changes; None when it runs from an installed copy.

    MXRL_COMMIT names it where the source travels without its history, or with an older one.
    """
    if named := os.environ.get("MXRL_COMMIT"):
        return named
    package = Path(__file__).resolve().parent
    root = package.parent.parent
    if not (root / ".git").exists() or (root / "src" / "mxrl") != package:
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+dirty" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def provenance(device: str, *packages: str) -> dict[str, Any]:
    """{"created", "versions", "commit", "device", "machine"}, for a result's JSON file."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(*packages),
        "commit": commit(),
        "device": device,
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_version() -> str:
    from mxrl import __version__

    return __version__
