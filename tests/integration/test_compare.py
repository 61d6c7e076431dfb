"""`mxrl analyze` of two checkpoints, and of activations, from end to end: files, tables, exit codes, the one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from mxrl.checkpoint import open_checkpoint
from mxrl.cli import main
from mxrl.decompose import ErrorStats
from mxrl.quantize import quantize
from mxrl.report.compare_summary import seen_dict, update_dict
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.scan import scan

FILES = ["report.html", "summary.json", "tensors.jsonl"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model("qwen3").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def quantized(model: Path) -> Path:
    """Its MXFP4 form, as compressed-tensors stores it; the last block's MLP is left in float32, one lacks."""
    out = model.parent / "packed"
    out.mkdir()
    data: dict[str, Any] = load_file(model / "model.safetensors")
    checkpoint = open_checkpoint(model)
    for w in checkpoint.weights:
        if "layers.1.mlp" not in w.name:
            q = quantize(data.pop(w.name), "mxfp4")
            data |= {f"{w.name}_packed": q.codes, f"{w.name}_scale": q.scales}
    del data["model.layers.1.mlp.gate_proj.weight"]
    save_file(data, out / "model.safetensors")
    return out


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[str, str]:
    """stdout and stderr of a call that must succeed."""
    capsys.readouterr()
    assert main(["analyze", *map(str, words)]) == 0
    return capsys.readouterr()


def failure(capsys: pytest.CaptureFixture[str], code: int, *words: str | Path) -> str:
    capsys.readouterr()
    assert main(["analyze", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("mxrl: ")
    assert "Traceback" not in err and "this is a bug" not in err
    return err


def read(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert sorted(p.name for p in out.iterdir()) == FILES
    rows = [json.loads(line) for line in (out / "tensors.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), rows


def rebuilds(out: Path) -> bool:
    """`mxrl report` makes the same page of the two other files."""
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    return (out / "report.html").read_bytes() == page


# ---- against ---------------------------------------------------------------------------------------------------------


def test_against(model: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    printed, err = run(capsys, quantized, "--against", model, "-r", "mxfp4+of", "-o", out)
    assert err == ""
    summary, rows = read(out)
    assert summary["analysis"] == "against"
    assert (summary["model"], summary["original"]["model"]) == ("packed", "tiny")
    assert summary["recipes"] == ["stored", "mxfp4", "mxfp4+of"]
    assert list(summary["total"]) == ["stored", "mxfp4", "mxfp4+of", "mxfp4:floor", "mxfp4:even", "nvfp4"]
    assert summary["tensors"] == 13
    own = {t.weight.name: t.stats for t in scan(open_checkpoint(model), ["mxfp4"]).tensors}
    stored = [r for r in rows if r["recipe"] == "stored"]
    assert len(stored) == 13 and len(rows) == 13 * 6
    for row in stored:
        if "layers.1.mlp" in row["name"]:
            assert (row["same_as"], row["sq_error"], row["bits"]) == ("original", 0.0, 32.0)
        else:
            assert (row["same_as"], row["reference"], row["same_grid"], row["bits"]) == ("mxfp4", "mxfp4", True, 4.25)
            assert ErrorStats.from_dict(row) == own[row["name"]]["mxfp4"]
    total = summary["total"]
    assert total["stored"]["relative_to_mxfp4"] == total["stored"]["sq_error"] / total["mxfp4"]["sq_error"] < 1
    assert summary["kinds"]["q"]["recipes"]["stored"] == summary["kinds"]["q"]["recipes"]["mxfp4"]
    (packed,) = (v for k, v in summary["formats"].items() if k.startswith("MXFP4"))
    assert packed["same_as"] == {"mxfp4": 11} and packed["equal_elements"]["mxfp4"] == 1.0
    (lone,) = summary["only_in_original"]
    assert lone["name"] == "model.layers.1.mlp.gate_proj.weight" and lone["reason"] == "packed has no such weight"
    for words in ("stored", "11 equal mxfp4 bit for bit", "2 of 13 weights are the original's", "gate_proj"):
        assert words in printed
    for side in (summary["source"], summary["original"]):
        assert all(len(f["sha256"]) == 64 for f in side["files"]) and side["files"]
    assert rebuilds(out)


def test_against_another_order_of_rows_warns(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    data[name] = data[name].flip(0)
    (tmp_path / "flipped").mkdir()
    save_file(data, tmp_path / "flipped" / "model.safetensors")
    _, err = run(capsys, tmp_path / "flipped", "--against", model, "-o", tmp_path / "out")
    assert err.startswith("mxrl: warning: 1 of 14 weights differ") and f"'{name}'" in err and err.count("\n") == 1


def test_against_something_quantized_warns(
    model: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run(capsys, model, "--against", quantized, "-o", tmp_path / "out")
    assert "packed is no original: 11 of its weights are quantized already" in err


# ---- diff ------------------------------------------------------------------------------------------------------------


def test_diff(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    after = tmp_path / "after"
    after.mkdir()
    data = load_file(model / "model.safetensors")
    g = torch.Generator().manual_seed(0)
    moved = {k: v + 1e-3 * torch.randn(v.shape, generator=g) if "q_proj" in k else v for k, v in data.items()}
    del moved["model.layers.1.mlp.gate_proj.weight"]
    save_file(moved, after / "model.safetensors")
    out = tmp_path / "out"
    printed, err = run(capsys, model, after, "-r", "mxfp4+of", "-r", "nvfp4", "-o", out)
    assert err == ""
    summary, rows = read(out)
    assert (summary["analysis"], summary["model"]) == ("diff", "tiny → after")
    assert summary["recipes"] == ["mxfp4", "mxfp4+of", "nvfp4"]
    assert len(rows) == 3 * 13 == 3 * summary["tensors"]
    q = summary["kinds"]["q"]
    a = torch.cat([data[n].flatten() for n in sorted(data) if "q_proj" in n]).double()
    b = torch.cat([moved[n].flatten() for n in sorted(data) if "q_proj" in n]).double()
    assert q["tensors"] == 2 and q["changed"] == int((a != b).sum())
    assert q["relative_change"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-12)
    assert summary["total"]["changed"] == q["changed"]
    for kind, entry in summary["kinds"].items():
        seen = entry["recipes"]["mxfp4"]
        assert (seen["values_changed"] > 0) == (kind == "q")
        assert seen["kept"] is None or kind == "q"
        assert (seen["difference"]["rel_mse"] != 0) == (kind == "q")
    assert q["recipes"]["mxfp4+of"]["below_half_step"] is None
    assert 0.9 < q["recipes"]["mxfp4"]["below_half_step"] <= 1
    assert summary["layers"].keys() == {"0", "1"}
    assert [e["name"] for e in summary["only_in_a"]] == ["model.layers.1.mlp.gate_proj.weight"]
    assert summary["only_in_b"] == []
    row = next(r for r in rows if "q_proj" in r["name"] and r["recipe"] == "nvfp4")
    assert set(row) >= {"b_name", "b_dtype", "relative_change", "kept", "unseen", "a", "b", "difference"}
    for words in ("‖B−A‖/‖A‖", "unseen", "1 only in A: model.layers.1.mlp.gate_proj.weight (after has no such weight)"):
        assert words in printed
    assert rebuilds(out)


def test_shares_of_nothing_are_none() -> None:
    from mxrl.changes import Seen, Update

    assert update_dict(Update())["relative_change"] is None
    entry = seen_dict(Seen(), Update())
    for name in ("kept", "unseen", "below_half_step", "below_half_step_elements", "codes_changed_fraction"):
        assert entry[name] is None


# ---- activations -----------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    save_policy(build_policy("moe", size="tiny"), char_tokenizer(), tmp_path / "policy")
    return tmp_path / "policy"


def test_activations(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    printed, err = run(capsys, policy, "--activations", "chain", "--prompts", "5", "-r", "mxfp4+of", "-o", out)
    assert err == ""
    summary, rows = read(out)
    assert summary["analysis"] == "activations" and summary["dtype"] == "bfloat16"
    task = summary["task"]
    assert (task["name"], task["prompts"], task["split"], task["seed"]) == ("chain", 5, "train", 0)
    assert summary["tensors"] == 12 and len(rows) == 12 * 5
    assert set(summary["kinds"]) == {"q", "k", "v", "o", "experts.gate_up", "experts.down"}
    for row in rows:
        assert row["rows"] == row["shape"][0] == task["tokens"] * (2 if row["kind"] == "experts.down" else 1)
    for recipe, entry in summary["total"].items():
        assert entry["numel"] == summary["elements"]
        assert entry["sq_error"] == pytest.approx(sum(r["sq_error"] for r in rows if r["recipe"] == recipe), rel=1e-12)
    assert "5 prompts of chain (train, seed 0)" in printed and "experts.down" in printed
    assert summary["left"]["router"]
    assert rebuilds(out)


def test_activations_of_a_shipped_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "policy:dense", "--activations", "chain", "--prompts", "2", "-o", tmp_path / "out")
    summary, _ = read(tmp_path / "out")
    assert summary["tensors"] == 56 and len(summary["layers"]) == 8


def test_a_shipped_policy_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For weights too; and the two have nothing in common but attention, the dense one in two layers more."""
    run(capsys, "policy:moe", "-o", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["tensors"] == 168
    run(capsys, "policy:moe", "policy:dense", "-o", tmp_path / "diff")
    summary, _ = read(tmp_path / "diff")
    assert set(summary["kinds"]) == {"q", "k", "v", "o"} and len(summary["only_in_a"]) == 144


# ---- what can go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["MODEL", "MODEL", "--against", "MODEL"], 2, "B and --against ask for different analyses"),
        (["MODEL", "--against", "MODEL", "--activations", "chain"], 2, "--against and --activations"),
        (["MODEL", "--against", "nowhere"], 1, "'nowhere': no such file"),
        (["MODEL", "nowhere"], 1, "'nowhere': no such file"),
        (["MODEL", "MODEL", "-r", "mxfp5"], 2, "mxfp5"),
        (["MODEL", "--against", "MODEL", "-r", "mxfp4+mbbs"], 2, "mbbs"),
        (["MODEL", "--against", "MODEL", "--device", "tpu"], 2, "tpu"),
        (["MODEL", "--against", "MODEL", "--cluster", "auto"], 2, "--cluster: --against makes no use of it; leave it"),
        (["MODEL", "--against", "nowhere", "--bits", "4"], 2, "a budget of 4 bits an element; give a number"),
        (["MODEL", "--activations", "chain", "--bits", "inf"], 2, "a budget of inf bits an element; give a number"),
        (["MODEL", "--activations", "chains"], 2, "unknown task 'chains'; possible: chain"),
        (["MODEL", "--activations", "chain:file"], 2, "task 'chain' takes no file"),
        (["MODEL", "--activations", "gsm8k:nowhere.jsonl"], 2, "no such file: nowhere.jsonl"),
        (["MODEL", "--activations", "chain", "--prompts", "0"], 2, "'--prompts'"),
        (["MODEL", "--activations", "chain"], 1, "makes no tokens of prompt 0; is it in the model's folder?"),
        (["MODEL/..", "--activations", "chain"], 1, "can't be loaded as a causal language model"),
        (
            ["MODEL/model.safetensors", "--activations", "chain"],
            1,
            "is a file; to run a model, give a Hugging Face folder",
        ),
        (["policy:mo", "--activations", "chain"], 2, "policy:dense, policy:moe"),
    ],
)
def test_one_line_and_nothing_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, part: str
) -> None:
    out = tmp_path / "out"
    assert part in failure(capsys, code, *(w.replace("MODEL", str(model)) for w in words), "-o", out)
    assert not out.exists() and not list(tmp_path.glob(".*"))


COMPARISON, ACTIVATIONS = ["MODEL", "MODEL"], ["MODEL", "--activations", "chain"]


@pytest.mark.parametrize(
    ("words", "options", "what"),
    [
        (["MODEL"], ["--prompts 5", "--prompts 64"], "an analysis of one checkpoint's weights"),
        (
            ["MODEL", "--cluster", "nowhere:1"],
            ["--prompts 5", "--jobs 1", "--memory 2GB", "--device cpu"],
            "a scan on a cluster",
        ),
        (
            COMPARISON,
            ["--prompts 5", "--jobs 1", "--memory 2GB", "--device cpu", "--cluster auto", "--no-resume", "--bits 5"],
            "a comparison of two checkpoints",
        ),
        (["MODEL", "--against", "MODEL"], ["--prompts 5", "--cluster auto", "--no-resume", "--resume"], "--against"),
        (
            ACTIVATIONS,
            ["--on-nonfinite skip", "--jobs 1", "--memory 2GB", "--cluster auto", "--no-resume"],
            "--activations",
        ),
    ],
)
def test_an_option_that_would_not_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], options: list[str], what: str
) -> None:
    for option in options:
        line = failure(capsys, 2, *words, *option.split(), "-o", tmp_path / "out")
        assert f"{option.split()[0]}: {what} makes no use of it; leave it out" in line


def test_two_models_with_nothing_in_common(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file({"model.layers.9.mlp.down_proj.weight": torch.ones(32, 32)}, other / "model.safetensors")
    for words in ((model, other), (model, "--against", other)):
        assert "have no weight in common" in failure(capsys, 1, *words, "-o", tmp_path / "out")


def test_a_nan_in_the_quantized_one(
    model: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_file(quantized / "model.safetensors")
    data["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = 255
    save_file(data, quantized / "model.safetensors")
    line = failure(capsys, 1, quantized, "--against", model, "-o", tmp_path / "out")
    assert "'model.layers.0.mlp.up_proj.weight' has 32 NaN" in line and "in packed; --on-nonfinite skip" in line
    assert not (tmp_path / "out").exists()
    _, err = run(capsys, quantized, "--against", model, "--on-nonfinite", "skip", "-o", tmp_path / "out")
    assert "left out tensor 'model.layers.0.mlp.up_proj.weight': 32 NaN" in err
    summary, _ = read(tmp_path / "out")
    assert summary["tensors"] == 12


def test_interrupted_leaves_nothing(
    model: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    for target, words in (
        ("mxrl.against.foreign_stats", (quantized, "--against", model)),
        ("mxrl.changes.update_of", (model, quantized)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, stop)
            assert "interrupted; nothing was written" in failure(capsys, 130, *words, "-o", out)
        assert not out.exists() and not list(tmp_path.glob(".*"))
