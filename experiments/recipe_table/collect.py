"""results/ from the sweep's runs: small rows, from which tables.py makes every figure of the page.

    python experiments/recipe_table/collect.py out/recipe_table            a sweep's folder, or
    python experiments/recipe_table/collect.py one.tar.gz two.tar.gz       what `sweep.py pack` wrote, joined

    runs.jsonl.gz     a row a run: options, what it ran on, how it ended, its evaluations with a digit a problem
    steps.jsonl.gz    a row a step: the columns that the page or a reader's first questions need, to 6 digits

Runs that haven't ended (no summary) are passed over, and counted. results/ is replaced, not added to.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mxrl.report.run_rows import Row, rows_of
from mxrl.report.runs import UNFINISHED, Run, read_run

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COLUMNS = (
    "step", "reward", "accuracy", "loss", "grad_norm", "entropy", "rollout/entropy", "completions/mean_length",
    "frac_reward_zero_std", "group/distinct_answers", "rollout/tokens", "aqn/sigma", "aqn/effective_sigma", "gap/k1",
    "gap/k3", "gap/pearson", "gap/chi2", "gap/ess", "gap/mean_abs", "gap/max_abs", "gap/truncated",
    "logits/sigma_eta", "weights/rel_mse", "style/careful", "time/step", "time/eval", "time/monitor",
)  # fmt: skip


def collect(places: Sequence[Path]) -> dict[str, list[Row]]:
    """Rows by the name of their file, runs by their name. Raises ValueError for a run that is there twice, or none."""
    runs: dict[str, Run] = {}
    unfinished = 0
    with ExitStack() as stack:
        for place in places:
            folder = place
            if place.is_file():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                try:
                    with tarfile.open(place) as archive:
                        archive.extractall(folder, filter="data")
                except tarfile.TarError as error:
                    raise ValueError(f"{place} is no .tar.gz of `sweep.py pack`: {error}") from None
            for config in sorted(folder.glob("*/*/s*/config.yaml")):
                name, run = str(config.parent.relative_to(folder)), read_run(config.parent)
                if run.state == UNFINISHED:
                    unfinished += 1
                elif name in runs:
                    raise ValueError(f"{place}: {name} is in an earlier one too; give each run once")
                else:
                    runs[name] = run
        if not runs:
            raise ValueError(f"no ended run (ARCHITECTURE/ROW/sSEED) in {', '.join(map(str, places))}")
        if unfinished:
            print(f"{unfinished} runs haven't ended, and are passed over", file=sys.stderr)
        return rows_of(runs, COLUMNS)


def write(path: Path, rows: Iterable[Row]) -> int:
    """Write rows as gzipped JSON lines, the same bytes for the same rows; how many bytes."""
    held = io.BytesIO()
    with gzip.GzipFile(fileobj=held, mode="wb", mtime=0) as file:  # no time in its head
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(held.getvalue())
    temporary.replace(path)
    return len(held.getvalue())


def read(path: Path) -> list[Row]:
    """The rows of a file of `write`; none where there is no file."""
    if not path.is_file():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main(places: Sequence[Path]) -> None:
    for name, rows in collect(places).items():
        file = RESULTS / f"{name}.jsonl.gz"
        print(f"{file}: {len(rows)} rows, {write(file, rows) / 1e3:.0f} kB")


if __name__ == "__main__":
    if not sys.argv[1:] or not all(Path(place).exists() for place in sys.argv[1:]):
        sys.exit("usage: collect.py FOLDER|FILE.tar.gz …, which exist: a sweep's folder, or what `sweep.py pack` wrote")
    try:
        main([Path(place) for place in sys.argv[1:]])
    except ValueError as error:  # ReportError among them
        sys.exit(f"collect.py: {error}")
