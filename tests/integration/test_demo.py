"""The demo from start to end on a tiny policy: what it writes, what it keeps, what it says when it can't."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mxrl.demo as module
from mxrl.cli import main
from mxrl.demo import Settings, assemble, demo
from mxrl.report.demo import build_page
from mxrl.report.phases import Phase, run_phase, weight_files
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy

PHASES = ["weights", "accuracy-bf16", "accuracy-mxfp4", "accuracy-mxfp4+of", "grpo-mxfp4+of+aqn"]


def _plain(name: str) -> str:
    """A phase's name without the policy's folder, which is pytest's."""
    return "weights" if name.startswith("weights-") else name


class Heard:
    """A Display that remembers which phases were run, and which were kept."""

    def __init__(self) -> None:
        self.planned = 0
        self.ended: list[bool] = []
        self.shares: list[float] = []

    def plan(self, costs: Sequence[float]) -> None:
        self.planned = len(costs)

    def begin(self, title: str) -> None:
        pass

    def within(self, share: float) -> None:
        self.shares.append(share)

    def end(self, seconds: float, kept: bool) -> None:
        self.ended.append(kept)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    save_policy(build_policy("dense", size="tiny", seed=0), char_tokenizer(), folder)
    card = {"problems": {"seed": 0}, "bf16": {"accuracy": 0.5, "n": 99}, "recipes": {}, "grpo": []}
    (folder / "card.json").write_text(json.dumps(card))
    return Settings(
        model=str(folder), analyzed=(str(folder),), errors=("mxfp4", "mxfp4+of"),
        evaluated=("bf16", "mxfp4", "mxfp4+of"), trained=("mxfp4+of+aqn",), problems=4, steps=2, prompts=2, samples=2,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_source() -> Iterator[None]:
    """The package's hash is part of the key; it must not change under a test because somebody edits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "source_hash", lambda: "c0ffee")
        yield


@pytest.fixture(scope="module")
def done(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Heard]:
    out, heard = tmp_path_factory.mktemp("out") / "demo", Heard()
    return out, demo(out, settings, display=heard), heard


def test_it_writes_the_page_and_every_number_of_it(done: tuple[Path, dict[str, Any], Heard]) -> None:
    out, result, heard = done
    stored = json.loads((out / "demo.json").read_text())
    assert stored == json.loads(json.dumps(result))
    assert build_page(stored).html() == (out / "demo.html").read_text()
    assert heard.ended == [False] * 5 and heard.planned == 5 and heard.shares[-1] == 1.0
    assert sorted(_plain(p.stem) for p in (out / "phases").iterdir()) == sorted(PHASES)
    assert [len(v["scores"]) for v in stored["accuracy"].values()] == [4, 4, 4]
    assert [row["step"] for row in stored["grpo"]["mxfp4+of+aqn"]["rows"]] == [1, 2]
    assert stored["grpo"]["mxfp4+of+aqn"]["rows"][0]["aqn/sigma"] > 0
    assert stored["card"]["bf16"]["n"] == 99
    assert {"commit", "versions", "device", "threads", "seconds"} <= stored.keys()


def test_the_comparisons_are_paired_and_of_the_right_sign() -> None:
    settings = Settings(analyzed=(), evaluated=("bf16", "mxfp4", "mxfp4+of"), trained=())
    scores = {"bf16": [1.0, 1.0, 1.0, 0.0], "mxfp4": [1.0, 0.0, 0.0, 0.0], "mxfp4+of": [1.0, 1.0, 0.0, 0.0]}
    results = {f"accuracy-{recipe}": {"scores": row, "seconds": 1.25} for recipe, row in scores.items()}
    found = assemble(settings, results, {"commit": None})
    assert {r: v[0] for r, v in found["minus_baseline"].items()} == {"mxfp4": -0.5, "mxfp4+of": -0.25}
    assert {r: v[0] for r, v in found["minus_plain"].items()} == {"mxfp4+of": 0.25}
    # differences 0, 1, 0, 0: sd = .5, so sd/√4 = .25
    _, low, high = found["minus_plain"]["mxfp4+of"]
    assert (low, high) == pytest.approx((0.25 - 1.95996 * 0.25, 0.25 + 1.95996 * 0.25), abs=1e-5)  # z to 5 digits
    assert found["seconds"] == 3.8 and found["grpo"] == {}


def test_what_is_done_is_kept_and_the_rest_is_done_again(
    done: tuple[Path, dict[str, Any], Heard], settings: Settings, tmp_path: Path
) -> None:
    out = tmp_path / "demo"
    shutil.copytree(done[0], out)
    (out / "demo.json").unlink()
    (out / "phases" / "accuracy-mxfp4.json").unlink()  # as if it had been killed there
    next((out / "phases").glob("weights-*.json")).write_text('{"key":')  # cut short
    heard = Heard()
    again = demo(out, settings, display=heard)
    assert heard.ended == [False, True, False, True, True]
    for name in ("minus_baseline", "minus_plain", "card", "grpo", "settings"):
        assert again[name] == done[1][name]
    assert again["accuracy"]["mxfp4"]["scores"] == done[1]["accuracy"]["mxfp4"]["scores"]


def test_other_settings_take_nothing_from_a_former_run(
    done: tuple[Path, dict[str, Any], Heard], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(settings: Settings, source: str = "c0ffee") -> dict[str, Any]:
        monkeypatch.setattr(module, "source_hash", lambda: source)
        phases = module._phases(settings, done[0], {"versions": {}})
        return {_plain(p.name): p.key for p in phases}

    first = keys(settings)
    other = keys(dataclasses.replace(settings, problems=5, lr=1e-4))
    assert [name for name in PHASES if first[name] != other[name]] == PHASES[1:]  # the weights are the same
    assert not any(first[name] == key for name, key in keys(settings, source="another").items())


def test_a_kept_result_is_used_under_its_own_key_only(tmp_path: Path) -> None:
    def run(key: int, value: int) -> tuple[Any, bool]:
        result, kept = run_phase(
            Phase("p", "", 1, {"k": (key,)}, lambda _: {"v": value}), tmp_path / "p.json", lambda _: None
        )
        return result["v"], kept

    assert [run(1, 10), run(1, 20), run(2, 30), run(2, 40)] == [(10, False), (10, True), (30, False), (30, True)]


def test_a_card_of_other_weights_is_left_out(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    shutil.copytree(settings.model, folder)
    wrong = {"weights": {"sha256": "0" * 64}}
    (folder / "card.json").write_text(json.dumps(wrong))
    assert module.card(str(folder)) is None
    right = {"weights": {"sha256": weight_files(str(folder))[0]["sha256"]}}
    (folder / "card.json").write_text(json.dumps(right))
    assert module.card(str(folder)) == right
    (folder / "card.json").unlink()
    assert module.card(str(folder)) is None


def test_a_place_that_cant_be_written_to_is_known_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["demo", "--out", str(place)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"mxrl: can't write to {place}")


def test_an_interrupted_demo_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_phase", stop)
    assert main(["demo", "--out", str(tmp_path / "d")]) == 130
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("mxrl: interrupted; what is done is kept in ")
    assert not (tmp_path / "d" / "demo.html").exists()


@pytest.mark.parametrize("words", [["--seed", "-1"], ["--seed", "x"], ["--sed", "1"]])
def test_a_wrong_call(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
