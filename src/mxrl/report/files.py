"""Files that appear whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a write fails of, whose error doesn't say to what


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name `path` where it has no room."""
    try:
        yield
    except OSError as err:
        if err.errno not in _FULL:
            raise
        raise OSError(f"can't write to {path}: {err.strerror}") from err


def write_atomically(path: Path, text: str) -> Path:
    """Write to a temporary name beside `path`, then rename: readers see the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with _naming(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's 0600 would hide a shared report from its readers
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`; what is in it moves to `out` when the block ends without an error.

    The folder is made at once, so that a place that can't be written is known before the work. A new `out` appears by
    one rename; into an existing one each file is renamed over its older namesake, and other files are left alone.
    Whatever interrupts the block, the temporary folder goes away; one that a killed run has left goes now: it is
    nobody's whose lock is free. Raises OSError naming `out`.
    """
    try:
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"{out} is a file")
        home = out.parent if not out.exists() else out
        home.mkdir(parents=True, exist_ok=True)
        for left in home.glob(f".{glob.escape(out.name)}.????????.tmp"):
            if (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=home))
    except OSError as err:
        raise OSError(f"can't write to {out}: {err.strerror or err}") from err
    lock = _locked(folder)
    try:
        with _naming(out):
            yield folder
        os.chmod(folder, 0o777 & ~_umask())  # mkdtemp's 0700 would hide a shared report from its readers
        if out.exists():
            for file in sorted(folder.iterdir()):
                os.replace(file, out / file.name)
            folder.rmdir()
        else:
            os.replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A handle that holds the folder's lock until it is closed, or its process ends; None if another one holds it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
