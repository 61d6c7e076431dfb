"""`mxrl analyze`: a checkpoint -> summary.json, tensors.jsonl and report.html.

    analyze(model, recipes, out)   open, scan and hash, write: the whole command

Besides the recipes asked for and the baselines, which see every element, those that the page's questions need
(answers.EXTRA) are measured on every n-th row; the files are written by folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mxrl.checkpoint import Checkpoint, open_checkpoint
from mxrl.provenance import provenance
from mxrl.report.answers import BITS, EXTRA, check_budget
from mxrl.report.files import staged
from mxrl.report.folder import Rows
from mxrl.report.page import percent
from mxrl.report.summary import rows_of, summary
from mxrl.scan import PLAIN, Step, parse_recipes, scan, wanted_of
from mxrl.scan_hashes import Hashes
from mxrl.scan_journal import Journal
from mxrl.scan_workers import MEMORY, devices_of, shape_of


class Progress(Protocol):
    """Told what is being done: a phase with its amount of work in bytes, then how much of it is done; or a `note`."""

    def start(self, phase: str, total: float) -> None: ...

    def advance(self, amount: float) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def start(self, phase: str, total: float) -> None:
        pass

    def advance(self, amount: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass


PACKAGES = ("torch", "safetensors", "gguf", "numpy")  # whose versions a summary names
NOTHING_KEPT = "interrupted; nothing was written"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during an analysis: the message says what was kept."""


def analyze(
    model: str | Path,
    recipes: Sequence[str] = (PLAIN,),
    *,
    out: Path,
    on_nonfinite: str = "error",
    progress: Progress | None = None,
    jobs: int | None = None,
    memory: int = MEMORY,
    device: str = "auto",
    cluster: str | None = None,
    resume: bool = True,
    bits: float = BITS,
) -> dict[str, Any]:
    """Scan `model` and write `out`/{summary.json, tensors.jsonl, report.html}; returns the summary.

    None of them appears in `out` before all three are complete; `out`/.scan.jsonl grows with every finished task (see
    `mxrl.scan_journal`), and what it holds is not computed again unless `resume` is False. bits: the budget of the
    recommendation. jobs, memory, device and cluster are `mxrl.scan.scan`'s. Raises RecipeError, CheckpointError,
    NonFiniteError, WorkerError, ClusterError, JournalError, OptionError, BudgetError, OSError and Interrupted.
    """
    progress = progress or Silent()
    recipes = parse_recipes(recipes)  # a wrong word is known before anything is read
    devices = devices_of(device)
    check_budget(bits)
    checkpoint = open_checkpoint(model)
    shape = shape_of(checkpoint, wanted_of(checkpoint, recipes, extra=EXTRA), jobs=jobs, memory=memory, device=device)
    kind = "cpu" if cluster else shape.devices[0].partition(":")[0]
    if kind == "cuda" and len(shape.devices) < len(devices):
        fits = f"{len(shape.devices)} of {len(devices)} GPUs are used"
        progress.note(f"{fits}: --memory {memory / 1e9:g}GB of the host's memory has no room for more processes")
    journal = Journal(out, checkpoint, kind, fresh=not resume)
    try:
        with (
            staged(out) as temporary,
            Rows(temporary, recipes[0]) as rows,
            Hashes(checkpoint.files, journal) as hashes,
        ):
            if journal.note:
                progress.note(f"{journal.path} is not used: {journal.note}; starting over")
            steps = _Steps(progress, checkpoint, journal)
            done = scan(
                checkpoint, recipes, extra=EXTRA, moments=True, on_nonfinite=on_nonfinite, progress=steps,
                jobs=jobs, memory=memory, device=device, cluster=cluster, journal=journal,
                finished=lambda tensor: rows.add(rows_of(tensor)),
            )  # fmt: skip
            steps.end()
            progress.start("hashing", hashes.left)
            files = hashes.wait(progress.advance)
            journal.check_unchanged()
            where = provenance(device_name(done.device), *PACKAGES)
            result = rows.finish(summary(done, files, where), bits)
    except KeyboardInterrupt:
        kept = journal.close()
        raise Interrupted(
            f"interrupted; what is done is kept in {out}, and the same command goes on from there"
            if kept
            else NOTHING_KEPT
        ) from None
    finally:
        journal.close()
    return result


def device_name(devices: str) -> str:
    """ "cpu", or the names of the GPUs "cuda:0, cuda:1", each kind once with its number."""
    if devices == "cpu":
        return devices
    import torch

    names = [torch.cuda.get_device_name(d) for d in devices.split(", ")]
    return ", ".join(name if (n := names.count(name)) == 1 else f"{n} × {name}" for name in dict.fromkeys(names))


class _Steps:
    """Turns a scan's steps into progress: what an earlier run had measured shortens the way."""

    def __init__(self, progress: Progress, checkpoint: Checkpoint, journal: Journal):
        self._progress, self._journal = progress, journal
        self._total = float(sum(w.nbytes for w in checkpoint.weights))
        self._known = 0.0
        self._started = False

    def __call__(self, step: Step) -> None:
        if not step.measured:
            self._known += step.nbytes
            return
        self._begin()
        self._progress.advance(step.nbytes)

    def end(self) -> None:
        self._begin()

    def _begin(self) -> None:
        if self._started:
            return
        self._started = True
        if self._known:
            share = "all" if self._known >= self._total * (1 - 1e-9) else percent(self._known / self._total)
            self._progress.note(f"{share} of the work is taken from {self._journal.path} (--no-resume measures anew)")
        self._progress.start("scanning", self._total - self._known)
