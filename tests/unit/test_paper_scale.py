"""experiments/paper_scale: counts of the real shapes, the memory formula against what autograd keeps and H200s took,
the page, and both configurations through `mxrl train` with shrunk copies. About 20 s."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from mxrl.rl.config import ConfigError, TrainConfig

HERE = Path(__file__).parents[2] / "experiments" / "paper_scale"
MODELS = ("qwen2.5-3b", "qwen3-30b-a3b")


def loaded(name):
    """A script of the experiment, its siblings importable by the names that they have when it is run."""
    if name in sys.modules and Path(sys.modules[name].__file__ or "").parent == HERE:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts():
    before = {name: sys.modules.pop(name, None) for name in ("estimate", "shrunk", "check", "peak", "tables")}
    yield {name: loaded(name) for name in ("estimate", "shrunk", "check", "peak", "tables")}
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def estimate(scripts):
    return scripts["estimate"]


@pytest.mark.parametrize(
    ("name", "parameters", "quantized", "kv"),
    [
        # the published checkpoints' counts; quantized: q, k, v, o and the MLP or experts, by hand
        ("qwen2.5-3b", 3_085_938_688, 36 * 2048 * (2 * 2048 + 2 * 256 + 3 * 11008), 36 * 2 * 2 * 256),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * 2048 * (2 * 4096 + 2 * 512 + 128 * 3 * 768), 48 * 2 * 2 * 512),
    ],
)
def test_real_shapes(estimate, name, parameters, quantized, kv):
    shape = estimate.Shape.of(HERE / "models" / name, "mxfp4+mbs+of:.5+aqn")
    assert (shape.parameters, shape.quantized, shape.kv_bytes) == (parameters, quantized, kv)
    if shape.experts:  # A3B: 3 billion multiply a token
        assert shape.used == quantized // (128 * 3 * 768 + 9216) * (8 * 3 * 768 + 9216) + parameters - quantized - (
            151936 * 2048
        )


def test_a_folder_without_a_configuration(estimate, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        estimate.Shape.of(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_activations_of_a_shrunk_copy(scripts, name):
    rows = list(scripts["check"].activations(name, lengths=(64, 128)))
    assert len(rows) == 6
    for row in rows:
        assert row["estimated"] == pytest.approx(row["measured"], rel=0.005), row


def test_peaks_that_were_measured(scripts):
    rows = [r for r in scripts["check"].benchmarks() if r["check"] == "peak"]
    assert {r["gpus"] for r in rows} == {1, 2} and len(rows) == 6
    for row in rows:
        assert row["estimated"] == pytest.approx(row["measured"], rel=0.02), row


def test_parts_of_the_memory(estimate):
    shape = estimate.Shape(1000, 800, 400, 2, 8, 16, 2, 1, 4, 25)
    config = TrainConfig(prompts_per_step=8, samples_per_prompt=2, micro_batch=4, reshard=True, recipe="mxfp4")
    sizes = {"prompt": 3, "new": 5, "slots": 2, "card": 1e9}
    one, two = (estimate.memory(shape, config, n, **sizes) for n in (1, 2))
    assert one.update["gradients"] == 4000 and two.update["gradients"] == 4000 / 2 + 4 * 400  # reduced after every pass
    assert (one.update["weights"], two.update["weights"], two.update["AdamW"]) == (4000, 2000, 4000)
    assert one.update["gathered"] == 0 and two.update["gathered"] == 4 * (2 * 400 + 200)
    assert one.rollout["quantized weights"] == two.rollout["quantized weights"] == 1600
    assert one.rollout["keys, values"] == 2 * 8 * shape.kv_bytes == 2 * 8 * 2 * 2 * 2 * 4
    whole = estimate.memory(shape, dataclasses.replace(config, reshard=False), 2, **sizes)
    assert whole.update["gathered"] == whole.update["gradients"] == 4000  # whole between passes
    single = estimate.memory(shape, dataclasses.replace(config, reshard=False, micro_batch=8), 2, **sizes)
    assert single.update["gradients"] == two.update["gradients"]  # one pass needs no keeping
    checkpointed = estimate.memory(shape, dataclasses.replace(config, gradient_checkpointing=True), 1, **sizes)
    block = 4 * 8 * estimate.saved_per_token(shape, "mxfp4", 8)
    assert one.update["activations"] == 2 * block + 8 * 8 * 32
    assert checkpointed.update["activations"] == 2 * 4 * 8 * 32 + block + 8 * 8 * 32


def test_the_largest_sizes_that_fit(estimate):
    config = TrainConfig.from_options(HERE / "qwen2.5-3b.yaml")
    shape = estimate.Shape.of(HERE / "models" / "qwen2.5-3b")
    speed = estimate.Speed(1e14, 1e14, 1e14, 1e-4, 1)
    found = estimate.fit(shape, config, 1, 80, speed, prompt=160, tokens=280)
    assert found.fits and found.memory.peak <= 0.92 * estimate.CARDS[80]
    wide = dataclasses.replace(config, gradient_checkpointing=False)
    smaller = estimate.fit(shape, wide, 8, 80, speed, prompt=160, tokens=280)
    assert smaller.fits and smaller.micro < found.micro  # without checkpointing fewer rows at a time
    twice = estimate.fit(shape, config, 2, 80, speed, prompt=160, tokens=280)
    assert twice.seconds["update"] == pytest.approx(found.seconds["update"] / 2)
    with pytest.raises(ConfigError, match="can't be shared by 3 processes"):
        estimate.fit(shape, config, 3, 80, speed, prompt=160, tokens=280)


def test_the_page_is_what_tables_prints(scripts):
    page = (HERE / "README.md").read_text()
    made = dict(scripts["tables"].parts())
    assert scripts["tables"].written(page, made) == page
    with pytest.raises(ValueError, match="<!-- host -->"):
        scripts["tables"].written("no marks", {"host": ""})


def test_a_measured_run_is_compared(scripts, tmp_path):
    options = TrainConfig(model="policy:dense", recipe="mxfp4", eval_problems=0).to_dict()
    (tmp_path / "config.yaml").write_text(json.dumps({**options, "run": {"processes": 1, "micro_batch": 256}}))
    with pytest.raises(SystemExit, match=r"no peak\.json there"):
        scripts["check"].of_run(tmp_path)
    (tmp_path / "peak.json").write_text(json.dumps({"max_memory_allocated": 10**9, "total_memory": 1, "prompt": 20}))
    row = scripts["check"].of_run(tmp_path)
    assert row["measured"] == 10**9 and 16 * 6.3e6 < row["estimated"] < 20e9


def test_arguments_of_peak(scripts):
    config = scripts["peak"].options([str(HERE / "qwen2.5-3b.yaml"), "--eval-problems", "0", "--steps", "2"])
    assert (config.steps, config.eval_problems, config.lr) == (2, 0, 1e-6)
    with pytest.raises(ConfigError, match="pairs of --option value"):
        scripts["peak"].options(["--steps"])
    assert scripts["peak"].longest_prompt(TrainConfig(steps=1)) < 40  # chains of 3 to 7 numbers, a character a token


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_of_a_shrunk_copy(scripts, name, tmp_path):
    from mxrl.rl.policy import save_policy
    from mxrl.rl.train import read_rows, train

    shrunk = scripts["shrunk"]
    real = AutoConfig.from_pretrained(HERE / "models" / name)
    small = shrunk.shrink(real)
    assert (
        small.num_attention_heads // small.num_key_value_heads == real.num_attention_heads // real.num_key_value_heads
    )
    assert small.tie_word_embeddings == real.tie_word_embeddings
    save_policy(shrunk.build(small), shrunk.tokenizer(), tmp_path / "model", dtype=torch.float32)
    # a random model's last number is often a digit: some answers are right, so that there is a gradient
    rows = [{"question": f"{i} + {i % 7}?", "answer": f"#### {i % 10}"} for i in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig.from_options(
        HERE / f"{name}.yaml", model=str(tmp_path / "model"), out=str(tmp_path / "run"), device="cpu", steps=2,
        task_options={"path": str(tmp_path / "train.jsonl")}, prompts_per_step=8, max_new_tokens=8, micro_batch=16,
        eval_problems=0, monitor_every=0, save_every=0, save_model=False,
    )  # fmt: skip
    assert config.gradient_checkpointing and config.recipe == "mxfp4+mbs+of:.5+aqn"
    assert train(config)["status"] == "done"
    steps = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 2 * 2 and steps[-1]["rollout"] == 1 and steps[0]["aqn/sigma"] > steps[-1]["aqn/sigma"]
    assert any(row["reward"] > 0 for row in steps) and any(row["grad_norm"] > 0 for row in steps)
