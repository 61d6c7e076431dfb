"""A run's folder: what is in it when a run starts, goes on or ends. train.py says which files there are."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxrl.integrations.trl_shards import complete_checkpoints, remove_incomplete
from mxrl.report.files import write_atomically
from mxrl.rl import ranks
from mxrl.rl.config import CONFIG, EVALS, METRICS, SUMMARY, ConfigError, TrainConfig
from mxrl.rl.policy import broken_weights

CHECKPOINTS = "checkpoints"
# when a run is resumed
MAY_DIFFER = ("save_every", "save_model", "stop_collapsed", "eval_batch", "reshard", "deterministic")

Row = dict[str, Any]
START_OVER = "--resume never starts over"


class DamagedError(ValueError):
    """A file of a run's folder that can't be read back: one line that names it and what would work."""


def open_run(out: Path, config: TrainConfig, resume: str) -> tuple[Path | None, dict[str, Any] | None]:
    """Prepare the folder: the checkpoint to go on from, or None, and the summary of a run that has ended, or None.

    Refuses a folder that holds another run. Raises DamagedError, and OSError for a folder that can't be written.
    """
    former = out / CONFIG
    if resume == "never" and former.is_file():
        for name in (CHECKPOINTS, "model"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in (SUMMARY, METRICS, EVALS, CONFIG):
            (out / name).unlink(missing_ok=True)
    if not former.is_file():
        _make(out)
        return None, None
    try:
        theirs = TrainConfig.from_options(former).to_dict()
    except ConfigError as error:
        raise DamagedError(f"{error}; {START_OVER}") from None
    for name, value in config.to_dict().items():
        if theirs[name] != value and name not in (*MAY_DIFFER, "out"):
            raise ConfigError(
                f"{out} holds a run with {name}={theirs[name]}, not {value}: give another out, or resume='never'"
            )
    remove_incomplete(out / CHECKPOINTS)
    found, ended, summary = complete_checkpoints(out / CHECKPOINTS), None, out / SUMMARY
    if summary.is_file():
        ended = _read_summary(summary)
        if ended["status"] == "collapsed" and not config.stop_collapsed:  # asked to go on all the same
            summary.unlink()
            ended = None
    if found and ended is None:
        _check(found)
    return found[-1] if found else None, ended


def _make(out: Path) -> None:
    try:
        if out.exists() and not out.is_dir():
            raise NotADirectoryError(f"{out} is a file")
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise OSError(f"can't write to {out}: {error.strerror or error}") from error


@contextlib.contextmanager
def leaving_nothing_empty(out: Path) -> Iterator[None]:
    """Where the block fails, take away the folders that were made for `out` and hold nothing yet."""
    made = [path for path in (out / CHECKPOINTS, out, *out.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in made if ranks.rank() == 0 else ():
            with contextlib.suppress(OSError):  # it holds something
                path.rmdir()
        raise


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    needed = {"status", "accuracy_before", "accuracy_after"}
    if isinstance(found, dict) and needed <= found.keys() and (found["status"] == "done" or "reason" in found):
        return found
    raise DamagedError(f"{path} is not what a run writes at its end: remove it to go on, or {START_OVER}")


def _check(found: list[Path]) -> None:
    """Raises DamagedError where a file of the last checkpoint was cut; reads no more than their headers."""
    broken = broken_weights(found[-1])
    for path in sorted(found[-1].iterdir()):
        try:
            whole = path.suffix not in (".pt", ".pth", ".bin") or zipfile.is_zipfile(path)  # as torch.save writes them
            if path.suffix == ".json":
                json.loads(path.read_bytes())
        except ValueError:
            whole = False
        if not whole or path in broken:
            former = f"remove {found[-1]} to go on from {found[-2].name}, or " if found[1:] else ""
            raise DamagedError(f"{path} is damaged; {former}{START_OVER}")


def advice(out: Path) -> str:
    """What to do when a run's process has ended too early."""
    found = complete_checkpoints(out / CHECKPOINTS)
    return f"the same command goes on from {found[-1].name}" if found else "it has no checkpoint, so it starts over"


def cut(out: Path, step: int) -> tuple[list[Row], list[Row]]:
    """Drop the lines of later steps than the checkpoint's (and a last line that a kill left unfinished).

    Returns what is left of metrics.jsonl and of evals.jsonl.
    """
    for name in (METRICS, EVALS):
        path = out / name
        if path.is_file():
            whole = path.read_text(errors="replace").splitlines(keepends=True) if step >= 0 else []
            whole = [line for line in whole if line.endswith("\n")]
            kept = [line for i, line in enumerate(whole) if _row(path, i, line)["step"] <= step]
            write_atomically(path, "".join(kept))
    return read_rows(out / METRICS), read_rows(out / EVALS)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a run's metrics.jsonl or evals.jsonl; empty when there is none. Raises DamagedError."""
    path = Path(path)
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [_row(path, i, line) for i, line in enumerate(lines)]


def _row(path: Path, index: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        where = f"{path}, line {index + 1}"
        raise DamagedError(f"{where}: not a line that a run writes: remove it to go on, or {START_OVER}")
    return row


def summarize(config: TrainConfig, out: Path, status: str, *, step: int, pinned: dict[str, Any]) -> Row:
    """What summary.json says of a run that is at this optimizer step, from the rows that it has written."""
    rows, evals = read_rows(out / METRICS), read_rows(out / EVALS)
    last = rows[-10:]

    def mean(name: str) -> float | None:
        values = [row[name] for row in last if row.get(name) is not None]
        return sum(values) / len(values) if values else None

    first, last_eval = (evals[0] if evals else {}), (evals[-1] if len(evals) > 1 else {})  # one is of before alone
    before, after = first.get("accuracy"), last_eval.get("accuracy")

    def sampled(row: dict[str, Any]) -> float | None:
        return row["sampled"]["accuracy"] if "sampled" in row else None

    names = ("reward", "accuracy", "completions/mean_length", "entropy", "gap/mean_abs", "gap/k3", "gap/ess",
             "gap/truncated", "group/distinct_answers", "grad_norm", "time/step", "time/rollout")  # fmt: skip
    return {
        "status": status,
        "recipe": config.recipe,
        "model": config.model,
        "task": config.task,
        "seed": config.seed,
        "steps": step // config.updates,
        "accuracy_before": before,
        "accuracy_after": after,
        "accuracy_gain": None if before is None or after is None else after - before,
        "sampled_before": sampled(first),
        "sampled_after": sampled(last_eval),
        "eval_problems": config.eval_problems,
        "last_10": {name: mean(name) for name in names},
        "seconds": sum(row.get("time/step") or 0.0 for row in rows),
        "pinned": pinned,
    }
