"""Long work in phases, each of whose results is kept: a command that was killed goes on where it was.

    prepare(out)                          find out now whether the folder can be written to
    run_phase(Phase(…), path, within)     the phase's result, from the file if that holds one of the same key

A phase's key holds all that its result depends on (settings, the weights' and the package's hash, versions), so another
call starts anew. `Display` is told what is being done; phases_console.py shows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mxrl.checkpoint import fingerprint, open_checkpoint
from mxrl.report.files import write_atomically
from mxrl.report.summary import to_json
from mxrl.rl.policy import resolve_model


class Display(Protocol):
    """Told what a command is doing."""

    def plan(self, costs: Sequence[float]) -> None:
        """The expected seconds of every phase, before the first one."""

    def begin(self, title: str) -> None: ...

    def within(self, share: float) -> None:
        """How much of the phase is done, 0 … 1."""

    def end(self, seconds: float, kept: bool) -> None:
        """The phase is over; `kept`: its result is that of a former run."""


class Silent:
    """A Display that shows nothing."""

    def plan(self, costs: Sequence[float]) -> None:
        pass

    def begin(self, title: str) -> None:
        pass

    def within(self, share: float) -> None:
        pass

    def end(self, seconds: float, kept: bool) -> None:
        pass


@dataclass(frozen=True)
class Phase:
    """A piece of work whose result is kept: `work(within)` gives a dictionary that JSON can hold."""

    name: str
    title: str
    cost: float  # seconds on two idle cores, for the estimate only
    key: dict[str, Any]
    work: Callable[[Callable[[float], None]], dict[str, Any]]


def run_phase(
    phase: Phase, path: Path, within: Callable[[float], None], *, resume: bool = True
) -> tuple[dict[str, Any], bool]:
    """(the phase's result with its seconds, whether it was in `path` already). resume: False never looks there.

    What was just computed passes through JSON as well, so that both ways give the same.
    """
    key = json.loads(json.dumps(phase.key))
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if resume else None
    except (OSError, ValueError):  # not there, or not ours to read: the phase is run
        found = None
    if isinstance(found, dict) and found.get("key") == key and "result" in found:
        return {**found["result"], "seconds": found["seconds"]}, True
    started = time.monotonic()
    result = phase.work(within)
    seconds = round(time.monotonic() - started, 2)
    text = to_json({"key": key, "seconds": seconds, "result": result}, indent=1)
    write_atomically(path, text + "\n")
    return {**json.loads(text)["result"], "seconds": seconds}, False


def prepare(out: Path, below: str = "phases") -> Path:
    """Make `out`/`below`, and find out now rather than after the work whether it can be written to; OSError says so."""
    try:
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"{out} is a file")
        (out / below).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out / below):
            pass
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OSError(f"can't write to {out}: {error.strerror or error}") from error
    return out / below


def source_hash() -> str:
    """A hash of the package's modules: with another code, a kept result is another result."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def weight_files(model: str) -> list[dict[str, Any]]:
    """Name, size and hash of a model's weight files. Raises PolicyError, CheckpointError."""
    return [dict(fingerprint(file)) for file in open_checkpoint(resolve_model(model)).files]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers and torchao print, bars and warnings: a Display is there instead."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    loggers = {name: logging.getLogger(name).level for name in ("torchao", "torch.utils._pytree")}
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
        for name, former in loggers.items():
            logging.getLogger(name).setLevel(former)
