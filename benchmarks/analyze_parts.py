"""Where the time of `mxrl analyze` goes: the command itself, in this process, with the time at which each part ended.

    python benchmarks/analyze_parts.py TIMES.json FOLDER --device cuda -o OUT      the arguments of `mxrl analyze`

TIMES.json: seconds since this process was started, by part, in their order:

    import       Python, torch, mxrl
    open         the checkpoint's headers, the journal with its samples of every file
    pool         this process's lane and the start of the others
    first        the first result: the CUDA context, the kernels loaded
    joined       each other process's first result (a list)
    scanned      the last result
    summed       what was left of the tensors' statistics and rows
    hashed       what was left of the files' sha256
    written      summary, page

With --profile as the first argument also the functions that took most of this process's time, to TIMES.json.txt.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import sys
import time
from pathlib import Path
from typing import Any


def since_start() -> float:
    """Seconds since this process was started, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Times:
    """When each part ended."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def note(self, name: str) -> None:
        self.found[name] = round(since_start(), 3)

    def after(self, owner: Any, attribute: str, name: str, *, once: bool = False) -> None:
        """Note `name` whenever owner.attribute returns; or only when it does first."""
        plain = getattr(owner, attribute)

        def timed(*args: Any, **options: Any) -> Any:
            result = plain(*args, **options)
            if not (once and name in self.found):
                self.note(name)
            return result

        setattr(owner, attribute, timed)


def main() -> int:
    arguments = sys.argv[1:]
    profiled = arguments[0] == "--profile"
    path, *arguments = arguments[profiled:]
    times = Times()

    from mxrl import cli, scan, scan_lane, scan_workers
    from mxrl.report import analyze

    times.note("import")
    times.after(analyze, "Journal", "open")
    times.after(scan, "open_pool", "pool")
    times.after(scan_lane.Lane, "next", "first", once=True)
    times.after(scan, "drive", "scanned")
    times.after(analyze, "scan", "summed")
    times.after(analyze.Hashes, "wait", "hashed")
    times.after(analyze.Rows, "finish", "written")
    receive = scan_workers.Processes._receive

    def received(self: scan_workers.Processes, worker: scan_workers._Worker) -> None:
        before = len(self._arrived)
        receive(self, worker)
        if len(self._arrived) > before and not hasattr(worker, "joined"):
            worker.joined = True  # type: ignore[attr-defined]
            times.found.setdefault("joined", []).append(round(since_start(), 3))

    scan_workers.Processes._receive = received  # type: ignore[method-assign]
    profile = cProfile.Profile()
    if profiled:
        profile.enable()
    code = cli.main(["analyze", *arguments])
    profile.disable()
    Path(path).write_text(json.dumps(times.found) + "\n")
    if profiled:
        text = io.StringIO()
        for order in ("tottime", "cumulative"):
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(60)
        Path(path + ".txt").write_text(text.getvalue())
    return code


if __name__ == "__main__":
    sys.exit(main())
