"""`mxrl probe` from start to end on tiny policies: what it writes, keeps, leaves out, and what it says to bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import mxrl.report.probe as module
from mxrl.cli import main
from mxrl.probes import run as probes
from mxrl.probes.run import PROBES, Settings
from mxrl.report.probe import probe
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy

TREATMENTS = ("mxfp4", "mxfp4@scale", "mxfp4@-scale", "mxfp4@~scale", "mxfp4@deadzone", "mxfp4@grid", "mxfp4+of")
DENSE = [name for name in PROBES if name != "routing"]


class Heard:
    """A Display that remembers which phases were kept, and can interrupt one."""

    def __init__(self, stop_at: int = 99) -> None:
        self.begun: list[str] = []
        self.kept: list[bool] = []
        self.stop_at = stop_at

    def plan(self, costs: Sequence[float]) -> None:
        assert all(cost > 0 for cost in costs)

    def begin(self, title: str) -> None:
        self.begun.append(title)
        if len(self.begun) > self.stop_at:
            raise KeyboardInterrupt

    def within(self, share: float) -> None:
        assert 0 <= share <= 1

    def end(self, seconds: float, kept: bool) -> None:
        self.kept.append(kept)


@pytest.fixture(scope="module", autouse=True)
def one_source() -> Iterator[None]:
    """The package's hash is part of the key; it must not change under a test because somebody edits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "source_hash", lambda: "c0ffee")
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("policies")
    for kind in ("dense", "moe"):
        save_policy(build_policy(kind, size="tiny", seed=0), char_tokenizer(), home / kind)
    save_policy(build_policy("dense", size="tiny", seed=0, num_hidden_layers=1), char_tokenizer(), home / "shallow")
    return {p.name: p for p in home.iterdir()}


def settings(folder: Path, *names: str) -> Settings:
    return Settings(
        str(folder), names or tuple(PROBES), TREATMENTS, task="chain", prompts=3, max_new_tokens=8, device="cpu"
    )  # fmt: skip


Done = tuple[Path, dict[str, Any], Heard]


def _done(folder: Path, out: Path) -> Done:
    heard = Heard()
    return out, probe(settings(folder), out, display=heard), heard


@pytest.fixture(scope="module")
def moe(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _done(folders["moe"], tmp_path_factory.mktemp("out") / "moe")


@pytest.fixture(scope="module")
def dense(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _done(folders["dense"], tmp_path_factory.mktemp("out") / "dense")


def _text(path: Path) -> str:
    html = path.read_text(encoding="utf-8")
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.S)).split())


def test_all_six_on_an_moe(moe: Done) -> None:
    out, data, heard = moe
    assert list(data["results"]) == list(PROBES) and data["skipped"] == {}
    assert heard.kept == [False] * 6 and heard.begun == [p.title for p in PROBES.values()]
    assert sorted(p.stem for p in (out / "probes").iterdir()) == sorted(PROBES)
    assert json.loads((out / "probe.json").read_text()) == json.loads(json.dumps(data))
    table = data["matrix"]
    assert [c["name"] for c in table["columns"]] == ["gradient", "rollout", "entropy", "routing"]
    assert table["rows"] == ["scale", "deadzone", "grid", "whole recipe", "mxfp4+of"]
    assert len(table["cells"]) == 20 and all(cell["effect"] is not None for cell in table["cells"])
    scale = next(c for c in table["cells"] if (c["row"], c["column"]) == ("scale", "gradient"))
    assert scale["removed"]["paired"] and scale["structure"]["paired"]
    assert {c["probe"] for c in data["claims"]} == set(PROBES)
    for result in data["results"].values():
        assert result["subject"]["prompts"] == 3 and result["subject"]["max_new_tokens"] == 8


def test_every_cell_stands_on_the_page_with_its_claim(moe: Done) -> None:
    out, data, _ = moe
    text = _text(out / "probe.html")
    html = (out / "probe.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", html)
    for column in data["matrix"]["columns"]:
        assert f"{column['name']}: {column['says']}" in text
    for claim in data["claims"]:
        assert claim["says"] in text
    assert html.count("<h2") >= 4 + len(data["results"])  # ours, and at least one of every probe
    assert data["files"][0]["sha256"] in text


def test_five_on_a_dense_model_and_the_page_says_why(dense: Done) -> None:
    out, data, heard = dense
    assert list(data["results"]) == DENSE and heard.kept == [False] * 5
    assert "no routed experts" in data["skipped"]["routing"]
    assert f"Left out: {data['skipped']['routing']}" in _text(out / "probe.html")
    assert [c["name"] for c in data["matrix"]["columns"]] == ["gradient", "rollout", "entropy"]


def test_the_page_comes_back_byte_for_byte(moe: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(moe[0], folder)
    before = (folder / "probe.html").read_bytes()
    (folder / "probe.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder / 'probe.html'}\n"
    assert (folder / "probe.html").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "part"),
    [("{", "is not valid JSON"), ('{"schema": 99}', "has schema 99"), ("[]", "has schema None"),
     ('{"schema": 1}', "is not what this mxrl writes (KeyError: 'subject')")],
)  # fmt: skip
def test_a_probe_json_that_no_page_can_be_made_of(
    content: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "probe.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and part in err and str(tmp_path) in err


def test_what_is_done_is_kept_through_an_interruption(
    moe: Done, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    whole = probes.run
    monkeypatch.setattr(probes, "run", lambda name, *rest: ran.append(name) or whole(name, *rest))
    out, asked = tmp_path / "p", settings(folders["moe"], "gradient", "routing", "temperature")
    with pytest.raises(KeyboardInterrupt):
        probe(asked, out, display=Heard(stop_at=2))
    assert ran == ["gradient", "routing"] and not (out / "probe.html").exists()
    heard = Heard()
    again = probe(asked, out, display=heard)
    assert ran == ["gradient", "routing", "temperature"] and heard.kept == [True, True, False]
    for name in asked.probes:
        assert again["results"][name] == json.loads(json.dumps(moe[1]["results"][name]))
    (out / "probes" / "routing.json").write_text('{"key":')  # cut short by whatever it was
    probe(asked, out, display=heard)
    assert ran[3:] == ["routing"]
    probe(dataclasses.replace(asked, probes=("routing",)), out, resume=False)
    assert ran[4:] == ["routing"]
    probe(dataclasses.replace(asked, probes=("routing",), seed=1), out)
    assert ran[5:] == ["routing"]


def test_other_weights_take_nothing_from_a_former_run(folders: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_policy(build_policy("moe", size="tiny", seed=1), char_tokenizer(), model)
    asked, heard = settings(model, "routing"), Heard()
    probe(asked, tmp_path / "p", display=heard)
    save_policy(build_policy("moe", size="tiny", seed=2), char_tokenizer(), model)
    probe(asked, tmp_path / "p", display=heard)
    assert heard.kept == [False, False]


def words(folder: Path, *more: str, name: str = "gradient", out: Path) -> list[str]:
    return ["probe", name, str(folder), "--task", "chain", "--prompts", "2", "--max-new-tokens", "4", "--device", "cpu",
            "-o", str(out), *more]  # fmt: skip


def test_the_command_prints_the_same_numbers(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(folders["moe"], "-r", "mxfp4+of", "--treatment", "mxfp4", name="routing", out=tmp_path / "p")
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"written: {tmp_path / 'p' / 'probe.html'}, probe.json\n")
    assert "mxrl probe: 1 phase, 0:" in err and "torchao" not in err
    assert "mxfp4+of" in out and "scale" in out and "arXiv 2605.20402" in out
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "p" / "probe.json").read_text())
    assert data["matrix"]["base"] == "mxfp4+of"  # the recipe that was taken apart
    assert data["settings"]["treatments"][0] == "mxfp4+of" and data["settings"]["treatments"][-1] == "mxfp4"


def test_ctrl_c_says_what_is_kept(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_phase", stop)
    assert main(words(folders["dense"], out=tmp_path / "p")) == 130
    out, err = capsys.readouterr()
    assert out == "" and f"kept in {tmp_path / 'p'}, and the same command goes on" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "more", "part"),
    [
        ("gradients", [], "unknown probe 'gradients'; possible: gradient, temperature, deadzone, drift, fork, routing"),
        ("gradient", ["--task", "chess"], "unknown task 'chess'; possible: chain"),
        ("gradient", ["--task", "chain:file"], "takes no file"),
        ("gradient", ["--task", "gsm8k:nowhere.jsonl"], "no such file: nowhere.jsonl"),
        ("gradient", ["--dtype", "int8"], "unknown dtype 'int8'; possible: float32, bfloat16, float16"),
        ("gradient", ["--device", "tpu"], "device 'tpu': possible are"),
        ("gradient", ["-r", "mxfp5"], "mxfp5"),
        ("gradient", ["--treatment", "mxfp4@scales"], "can't read '@scales'; possible: @NAME"),
        ("gradient", ["-r", "bf16"], "give a recipe to compare"),
        ("gradient", ["--prompts", "0"], "Invalid value for '--prompts'"),
    ],
)
def test_a_wrong_call(
    name: str, more: list[str], part: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folders["dense"], *more, name=name, out=tmp_path / "p")) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err and err.count("\n") == 1


def test_a_folder_that_is_no_policy_of_ours_needs_a_task(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "all", str(folders["dense"]), "-o", str(tmp_path / "p")]) == 2
    assert "say what to ask it: --task" in capsys.readouterr().err


def _fails(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and part in err and err.count("\n") == 1 and "this is a bug" not in err


def test_work_that_cant_be_done(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = tmp_path / "p"
    _fails(words(folders["dense"], name="routing", out=p), "has no routed experts", capsys)
    _fails(words(folders["shallow"], out=p), "has 1 decoder blocks; the gradient probe takes at least 2", capsys)
    _fails(words(folders["dense"], "--max-new-tokens", "600", out=p), "--max-new-tokens", capsys)
    _fails(words(tmp_path / "nowhere", out=p), "nowhere", capsys)
    backward = words(folders["dense"], "--treatment", "mxfp4@backward", name="fork", out=p)
    _fails(backward, "runs no backward pass", capsys)
    (tmp_path / "file").write_text("")
    _fails(words(folders["dense"], out=tmp_path / "file"), f"can't write to {tmp_path / 'file'}", capsys)


@pytest.mark.parametrize("value", [torch.nan, 3e38])
def test_weights_and_activations_that_arent_finite(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN in a weight; or finite weights whose products overflow."""
    model = build_policy("dense", size="tiny", seed=0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(value)
    save_policy(model, char_tokenizer(), tmp_path / "bad", dtype=torch.float32)
    capsys.readouterr()  # what saving prints
    _fails(words(tmp_path / "bad", out=tmp_path / "p"), "model.layers.1.mlp.up_proj", capsys)
