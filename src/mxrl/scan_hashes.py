"""sha256 of a checkpoint's files, taken beside the scan (hashlib lets Python's lock go), and kept in its journal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from mxrl.checkpoint import fingerprint
from mxrl.scan_journal import Journal

_HASHERS = min(8, max(2, (os.cpu_count() or 1) // 4))  # files hashed at a time


class Hashes:
    """sha256 of a checkpoint's files in threads of their own, beside the scan; those in the journal are taken from it.

    wait() gives the fingerprints in the files' order. On the way out, what is still running is stopped.
    """

    def __init__(self, files: Sequence[Path], journal: Journal):
        self._journal, self._stop = journal, threading.Event()
        self._pool = ThreadPoolExecutor(_HASHERS, thread_name_prefix="mxrl-hash")
        self._read, self._lock = 0, threading.Lock()
        self._sizes = [file.stat().st_size for file in files]
        self._running = [self._pool.submit(self._hash, file) for file in files]
        self._files = files

    def __enter__(self) -> Hashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    @property
    def left(self) -> int:
        """Bytes still to be read."""
        return sum(self._sizes) - self._read

    def wait(self, advance: Callable[[float], None]) -> list[dict[str, Any]]:
        for running in self._running:
            while not running.done():
                before = self._read
                wait([running], timeout=0.2)
                advance(self._read - before)
        found = [running.result() for running in self._running]
        for file, entry in zip(self._files, found, strict=True):
            if str(file.resolve()) not in self._journal.hashes:
                self._journal.add_hash(file, entry["sha256"])
        return found

    def _hash(self, file: Path) -> dict[str, Any]:
        if known := self._journal.hashes.get(str(file.resolve())):
            size = file.stat().st_size
            self._advance(size)
            return {"name": file.name, "bytes": size, "sha256": known}
        return fingerprint(file, self._advance)

    def _advance(self, amount: int) -> None:
        with self._lock:
            self._read += amount
        if self._stop.is_set():
            raise InterruptedError("hashing was stopped")
