"""Probes of one model that were run apart, on one page: FOLDER/*/probe.json -> FOLDER/{probe.json, probe.html}.

    python experiments/probes/join.py FOLDER

They must be of the same weights, versions and machine; the matrix and the claims are formed of all of them, as `mxrl
probe all` does in one process. Numbers of prompts may differ. So may commits, where a later one didn't change what the
earlier probes measure: the joined file then has `commits`, each probe's own, and `commit` names all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mxrl.probes.run import PROBES, together
from mxrl.report.files import write_atomically
from mxrl.report.probe import DATA, rebuild, to_text

SAME = ("schema", "files", "versions", "device", "machine")


def join(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """probe.json of all; raises ValueError where two weren't made alike. found: by folder."""
    first_name, first = next(iter(found.items()))
    for name, data in found.items():
        for key in SAME:
            if data[key] != first[key]:
                raise ValueError(f"{name} and {first_name} differ in {key}: {data[key]} and {first[key]}")
    results = {p: d["results"][p] for p in PROBES for d in found.values() if p in d["results"]}
    commits = {p: d["commit"] for d in found.values() for p in d["results"]}
    missing = {p: f"{p} isn't among the results that were joined" for p in PROBES if p not in results}
    return first | {
        "results": results,
        "skipped": missing | {k: v for d in found.values() for k, v in d["skipped"].items()},
        "settings": first["settings"] | {"probes": list(results)},
        "commit": ", ".join(sorted(set(commits.values()))),
        "commits": commits,
        **together(results),
        "seconds": {p: s for d in found.values() for p, s in d["seconds"].items()},
        "created": max(d["created"] for d in found.values()),
    }


def main(folder: Path) -> None:
    paths = sorted(folder.glob(f"*/{DATA}"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no folder with a {DATA}; run.sh makes them")
    data = join({path.parent.name: json.loads(path.read_text()) for path in paths})
    write_atomically(folder / DATA, to_text(data) + "\n")
    print(f"written: {rebuild(folder)}, of {', '.join(data['results'])}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
