"""The demo's page and its terminal table, from a small demo.json made here."""

from __future__ import annotations

import io
import json
import math
import re
from html import unescape
from typing import Any

import pytest
import torch
from rich.console import Console

from mxrl.decompose import error_stats
from mxrl.demo import _Said
from mxrl.report import phases_console
from mxrl.report.demo import build_page, half_width, interval, points, sentences
from mxrl.report.demo_console import print_demo
from mxrl.report.phases_console import Phases
from mxrl.report.summary import stats_dict

RECIPES = ("mxfp4", "mxfp4+of")


def _accuracy(value: float) -> dict[str, Any]:
    return {"accuracy": value, "by_group": {"3": {"accuracy": value, "n": 8}}, "scores": [1.0, 0.0] * 4, "seconds": 1.5}


@pytest.fixture
def stored() -> dict[str, Any]:
    """A demo.json as it comes from the disk; accuracies and intervals are round numbers, the weights random."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    total = {r: stats_dict(error_stats(x, r)) | {"bits": 4.25, "relative_to_mxfp4": 1.0} for r in RECIPES}
    file = {"name": "model.safetensors", "bytes": 1234, "sha256": "ab" * 32}
    rows = [{"step": s, "accuracy": 0.5 + s / 100, "gap/mean_abs": 0.001 * s, "grad_norm": None} for s in (1, 2)]
    demo = {
        "settings": {
            "seed": 0, "model": "policy:dense", "evaluated": ["bf16", *RECIPES], "problems": 8, "steps": 2,
            "prompts": 2, "samples": 4, "lr": 5e-5,
        },
        "weights": {
            "dense": {"model": "policy:dense", "tensors": 1, "elements": 512, "total": total, "files": [file],
                      "seconds": 1}
        },
        "accuracy": {"bf16": _accuracy(0.75), "mxfp4": _accuracy(0.5), "mxfp4+of": _accuracy(0.625)},
        "minus_baseline": {"mxfp4": [-0.25, -0.4, -0.1], "mxfp4+of": [-0.125, -0.225, -0.025]},
        "minus_plain": {"mxfp4+of": [0.125, -0.05, 0.3]},
        "grpo": {r: {"rows": rows, "pinned": {"recipe": r, "loss": "dapo"}, "seconds": 2} for r in ("bf16", "mxfp4")},
        "card": {
            "problems": {"seed": 0}, "device": "Some GPU", "date": "2026-01-01", "versions": {"torch": "9"},
            "bf16": {"accuracy": 0.775, "n": 2048},
            "recipes": {
                "mxfp4": {"accuracy": 0.6436, "minus_bf16": [-0.1318, -0.15, -0.114], "recovered": 0.0},
                "nvfp4": {"accuracy": 0.7173, "minus_bf16": [-0.0581, -0.073, -0.043], "recovered": 0.56},
            },
            "grpo": [
                {"seed": s, "lr": 5e-5, "steps": 60, "prompts": 64, "samples": 8, "before": 0.77, "after": after,
                 "gain": after - 0.77, "interval": [after - 0.79, after - 0.75],
                 "evals": [{"step": 0, "accuracy": 0.77}, {"step": 60, "accuracy": after}]}
                for s, after in ((0, 0.94), (1, 0.92))
            ],
        },
        "threads": 2, "dtype": "float32", "seconds": 10.0, "device": "cpu", "machine": "Linux", "commit": None,
        "created": "2026-01-01T00:00:00+00:00", "versions": {"python": "3.11", "mxrl": "0.1.0"},
    }  # fmt: skip
    return json.loads(json.dumps(demo))


def _text(html: str) -> str:
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.S)).split())


def test_the_loss_and_what_is_given_back_stand_with_their_intervals(stored: dict[str, Any]) -> None:
    loss, back = sentences(stored)
    assert loss == (
        "`mxfp4` for weights and activations takes greedy accuracy from 75.0 % to 50.0 %: −25.0 [−40.0, −10.0] points."
    )
    assert back == "`mxfp4+of` gives back +12.5 [−5.0, +30.0] points, undecided at this size."
    assert half_width(stored) == pytest.approx(0.175)  # 12.5 ± 17.5: decimal fractions aren't exact
    text = _text(build_page(stored).html())
    assert "8 problems: an interval reaches up to ±17.5 points" in text


def test_the_cards_figures_stand_beside(stored: dict[str, Any]) -> None:
    text = _text(build_page(stored).html())
    assert "2048 problems on one Some GPU" in text
    assert "mxfp4 50.0 % −25.0 [−40.0, −10.0] – 64.4 % −13.2 [−15.0, −11.4] 0 %" in text
    assert "mxfp4+of 62.5 % −12.5 [−22.5, −2.5] +12.5 [−5.0, +30.0] – – –" in text  # the card doesn't have it
    assert "nvfp4 – – – 71.7 % −5.8 [−7.3, −4.3] 56 %" in text  # only the card has it
    assert "are the first of the card's 2048" in text
    stored["settings"]["seed"] = 1
    assert "drawn with another seed than the card's" in _text(build_page(stored).html())


def test_the_page_says_that_the_curves_are_noise_and_what_the_card_found(stored: dict[str, Any]) -> None:
    text = _text(build_page(stored).html())
    assert "These curves are noise: 2 steps of 2 prompts × 4 samples" in text
    assert "+15.0 to +17.0 points of greedy accuracy in 60 steps on a GPU, 2 seeds" in text


def test_without_a_card_the_page_says_so(stored: dict[str, Any]) -> None:
    stored["card"] = None
    text = _text(build_page(stored).html())
    assert "There is no model card for these weights" in text
    assert "no model card with longer runs" in text
    assert "2048" not in text


def test_the_page_asks_for_nothing_and_names_its_origin(stored: dict[str, Any]) -> None:
    html = build_page(stored).html()
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", html)
    assert "ab" * 32 in html and "2 threads, float32" in html


def test_numbers_as_text() -> None:
    assert [points(v) for v in (-0.132, 0.0, 0.05, math.nan, None)] == ["−13.2", "+0.0", "+5.0", "–", "–"]
    assert interval([-0.1, -0.2, 0.0]) == "−10.0 [−20.0, +0.0]"
    assert interval(None) == "–"


@pytest.mark.parametrize("with_card", [True, False])
def test_the_terminal_shows_the_same(stored: dict[str, Any], with_card: bool) -> None:
    if not with_card:
        stored["card"] = None
    console = Console(file=io.StringIO(), width=120)
    print_demo(stored, console)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "50.0 % −25.0 [−40.0, −10.0]" in text
    assert ("64.4 %" in text) is with_card
    assert "bf16 gap 0.001500" in text  # the mean of .001 and .002


def test_the_estimate_follows_what_the_phases_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(phases_console.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO())
    phases = Phases(console, "demo", "loading")
    assert phases.left() == 0
    phases.plan([10, 20, 30])
    assert phases.left() == 60
    phases.begin("one")
    now[0] += 4
    assert phases.left() == 56
    phases.end(20, kept=False)  # twice as slow as expected
    assert phases.left() == 96  # 4 of the next 40 seconds seem gone until it begins
    phases.begin("two")
    assert phases.left() == 100
    now[0] += 10
    phases.within(0.5)
    assert phases.left() == 70  # half in 10 s: 10 more, and the last phase's 60
    phases.end(1, kept=True)  # says nothing about the speed
    phases.begin("three")
    assert phases.left() == 60
    phases.end(60, kept=False)
    assert phases.left() == 0
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert said[0] == "mxrl demo: 3 phases, 1:00 on two idle cores"
    assert said[2].startswith("mxrl demo: 2/3 two: kept from before; ")


def test_a_runs_words_become_progress(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[int] = []
    said = _Said(steps.append)
    print("mxrl GRPO: loss dapo", file=said)
    print("step 3/4  reward 1", file=said)
    print("stopping after this step (once more: at once)", file=said)
    assert steps == [3]
    assert capsys.readouterr() == ("", "stopping after this step (once more: at once)\n")
