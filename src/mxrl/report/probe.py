"""`mxrl probe`: a model → the probes, one after another → out/{probe.json, probe.html}.

    probe(Settings("policy:dense"), out)     all that is asked, then both files
    rebuild(out)                             probe.html once more from probe.json, the same bytes: `mxrl report FOLDER`

Each probe's result is kept in out/probes/NAME.json as soon as it is there (phases.py), so a killed call goes on. The
page is made of probe.json alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mxrl.probes import run as probes
from mxrl.probes.run import PROBES, Settings
from mxrl.probes.subject import ProbeError
from mxrl.provenance import provenance
from mxrl.report.analyze import device_name
from mxrl.report.files import write_atomically
from mxrl.report.phases import Display, Phase, Silent, prepare, quiet, run_phase, source_hash, weight_files
from mxrl.report.probe_page import build_page
from mxrl.report.summary import to_json

SCHEMA = 1
DATA, PAGE, KEPT = "probe.json", "probe.html", "probes"
PACKAGES = ("torch", "transformers", "numpy", "safetensors")


class ProbeReportError(ValueError):
    """A folder that no page can be made from: the message names the file and what would work."""


def probe(settings: Settings, out: Path, *, display: Display | None = None, resume: bool = True) -> dict[str, Any]:
    """Run every asked probe that `out` doesn't hold yet, then write `out`/probe.json and probe.html; returns the first.

    A probe that can't be run on this model is left out, and the page says why; asked alone, it is an error. resume:
    False computes everything anew. Raises OSError naming `out` where it can't be written to, ProbeError, TaskError,
    OptionError, PolicyError, CheckpointError, NonFiniteError. KeyboardInterrupt passes through; what is done stays.
    """
    display = display or Silent()
    kept_in = prepare(out, KEPT)
    with quiet():
        subject = probes.opened(settings)
        unfit = {name: why for name in settings.probes if (why := probes.unfit(name, subject, settings))}
        fit = [name for name in settings.probes if name not in unfit]
        if not fit:
            raise ProbeError(next(iter(unfit.values())))
        files = weight_files(settings.model)
        where = str(subject.device)
        origin = provenance(device_name(where), *PACKAGES)
        common = {"files": files, "source": source_hash(), "versions": origin["versions"], "on": origin["device"]}
        phases = [
            Phase(
                name, PROBES[name].title, probes.seconds(name, subject, settings),
                common | probes.key(name, subject, settings),
                lambda within, name=name: probes.run(name, subject, settings, within),
            )
            for name in fit
        ]  # fmt: skip
        display.plan([phase.cost for phase in phases])
        results: dict[str, dict[str, Any]] = {}
        for phase in phases:
            display.begin(phase.title)
            results[phase.name], kept = run_phase(phase, kept_in / f"{phase.name}.json", display.within, resume=resume)
            display.end(results[phase.name]["seconds"], kept)
    data = {
        "schema": SCHEMA,
        "subject": subject.about(),
        "settings": asdict(settings),
        "files": files,
        "results": results,
        "skipped": unfit,
        **probes.together(results),
        "seconds": {name: result.pop("seconds") for name, result in results.items()},
        "threads": torch.get_num_threads(),
        **origin,
    }
    write_atomically(out / DATA, to_text(data) + "\n")
    rebuild(out)
    return data


def to_text(data: dict[str, Any]) -> str:
    """probe.json: a line for each key, and one for each list of numbers, however long."""
    one_line = re.compile(r"\[\n\s*(?:[-+.\deE]+|null)(?:,\n\s*(?:[-+.\deE]+|null))*\n\s*\]")
    text = to_json(data, indent=1)
    return one_line.sub(lambda found: f"[{', '.join(found[0][1:-1].replace(',', ' ').split())}]", text)


def rebuild(folder: Path) -> Path:
    """Make probe.html of a folder's probe.json; returns its path. Raises ProbeReportError, OSError."""
    path = folder / DATA
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProbeReportError(f"{folder} has no {DATA}; give a folder that `mxrl probe` has written") from None
    except (ValueError, RecursionError) as error:
        raise ProbeReportError(f"{path} is not valid JSON ({error}); run `mxrl probe` again") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise ProbeReportError(f"{path} has schema {found}, this mxrl reads {SCHEMA}; run `mxrl probe` again")
    try:
        page = build_page(data).html()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, StopIteration) as error:
        what = f"{type(error).__name__}: {error}"
        raise ProbeReportError(f"{path} is not what this mxrl writes ({what}); run `mxrl probe` again") from error
    return write_atomically(folder / PAGE, page)
