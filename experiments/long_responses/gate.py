"""Whether a policy is fit for the experiment: it can rewrite chains of the three lengths, and has headroom.

    python experiments/long_responses/gate.py out/long/eval.json        exit code 1 where it isn't

By `eval.json` of experiments/policies/run.py, in bands of numbers around the lengths of sweep.yaml. A band passes where
the samples in the `rewrite` style are right at least TAUGHT of the time (so that GRPO has something to reinforce), and
right more often than greedy decoding, which takes another style, by at least HEADROOM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BANDS = {"short": (5, 7), "mid": (14, 18), "long": (38, 42)}  # numbers in the chain, around those of sweep.yaml
TAUGHT = 0.10
HEADROOM = 0.05


def bands(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per band: accuracy `greedy`, accuracy of sampled rewrites (`rewrite`; 0 where none was), their `share`.

    Bands that the evaluation has no problems of are left out.
    """
    greedy, sampled = record["greedy"]["by_group"], record["sampled"]
    found = {}
    for name, (low, high) in BANDS.items():
        groups = [group for group in greedy if low <= int(group) <= high]
        problems = sum(greedy[group]["n"] for group in groups)
        if not problems:
            continue
        right, drawn = (sum(sampled["by_group_rewrite"][group][i] for group in groups) for i in (0, 1))
        found[name] = {
            "greedy": sum(greedy[group]["accuracy"] * greedy[group]["n"] for group in groups) / problems,
            "rewrite": right / drawn if drawn else 0.0,
            "share": drawn / (problems * sampled["samples"]),
        }
    return found


def passes(band: dict[str, float]) -> bool:
    """Whether GRPO has something to reinforce there, and room above what greedy decoding does."""
    return band["rewrite"] >= TAUGHT and band["rewrite"] - band["greedy"] >= HEADROOM


def main(path: str) -> int:
    found = bands(json.loads(Path(path).read_text()))
    for name, band in found.items():
        told = f"greedy {band['greedy']:.3f}  rewritten samples {band['rewrite']:.3f} (share {band['share']:.2f})"
        print(f"{name:6} {told}  {'passed' if passes(band) else 'NOT passed'}")
    for name in BANDS:
        if name not in found:
            print(f"{name:6} not evaluated")
    return 0 if all(name in found and passes(found[name]) for name in BANDS) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print((__doc__ or "").splitlines()[2].strip(), file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
