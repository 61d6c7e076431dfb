"""TrainConfig: what a file and a command line may say, and the one line that comes back when they can't."""

import pytest

from mxrl.recipes import RecipeError
from mxrl.rl.config import ConfigError, TrainConfig


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_options_over_a_file(tmp_path):
    path = write(
        tmp_path, "recipe: mxfp4+of\nlr: 1e-4\nsteps: 7\ntask_options: {numbers: [3, 4]}\nrun: {commit: abc}\n"
    )
    config = TrainConfig.from_options(path, steps="9", out=None, lm_head_fp32="true", micro_batch="null")
    assert (config.recipe, config.lr, config.steps, config.lm_head_fp32) == ("mxfp4+of", 1e-4, 9, True)
    assert config.task_options == {"numbers": [3, 4]} and config.out == TrainConfig().out
    assert config.micro_batch is None


def test_what_it_writes_it_reads(tmp_path):
    import yaml

    config = TrainConfig(recipe="bf16", lr=3e-5, task_options={"ops": "+-"}, rollout_batch=16)
    path = write(tmp_path, yaml.safe_dump({**config.to_dict(), "run": {"device": "cpu"}}))
    assert TrainConfig.from_options(path) == config


@pytest.mark.parametrize(
    "options, message",
    [
        ({"learning": 1e-4}, "unknown option 'learning'"),
        ({"promts_per_step": 4}, r"unknown option 'promts_per_step' \(did you mean 'prompts_per_step'\?\)"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"steps": "2.5"}, "steps='2.5' must be a whole number"),
        ({"steps": True}, "steps=True must be a whole number"),
        ({"save_model": "perhaps"}, "save_model='perhaps' must be true or false"),
        ({"steps": 0}, "steps=0 must be positive"),
        ({"lr": float("nan")}, "lr=nan must be positive"),
        ({"lr": "inf"}, "lr=inf must be positive and finite"),
        ({"lr": "1e400"}, "lr=inf must be positive and finite"),
        ({"tis_cap": "inf"}, "tis_cap=inf must be positive and finite"),
        ({"clip": "-1"}, r"clip=-1\.0 must be 0 or more, and finite"),
        ({"clip": "nan"}, "clip=nan must be 0 or more"),
        ({"clip": "inf"}, "clip=inf must be 0 or more"),
        ({"clip_high": -5}, r"clip_high=-5\.0 must be 0 or more"),
        ({"weight_decay": "-1"}, r"weight_decay=-1\.0 must be 0 or more"),
        ({"weight_decay": "nan"}, "weight_decay=nan must be 0 or more"),
        ({"max_grad_norm": "nan"}, r"max_grad_norm=nan must be 0 \(no clipping\) or more"),
        ({"beta2": 2}, r"beta2=2\.0 must be in \[0, 1\)"),
        ({"beta2": "nan"}, r"beta2=nan must be in \[0, 1\)"),
        ({"temperature": "inf"}, r"temperature=inf must be in 0\.001 … 1000"),
        ({"temperature": "1e-300"}, r"temperature=1e-300 must be in 0\.001 … 1000"),
        ({"seed": -1}, "seed=-1 must be in 0 … 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be in 0"),
        ({"eval_seed": -1}, "eval_seed=-1 must be in 0"),
        ({"recipe": 5}, "recipe=5 must be text"),
        ({"out": ""}, "out='' is empty; leave it out for 'runs/train'"),
        ({"eval_every": -1}, "eval_every=-1 must not be negative"),
        ({"eval_samples": -1}, "eval_samples=-1 must not be negative"),
        ({"lora_rank": -4}, "lora_rank=-4 must not be negative"),
        ({"lora_rank": 4, "lora_alpha": 0}, "lora_alpha=0.0 must be positive"),
        ({"lora_alpha": 16}, "lora_alpha=16 needs lora_rank"),
        ({"samples_per_prompt": 1}, "at least 2"),
        ({"loss": "grop"}, r"loss='grop' \(did you mean 'grpo'\?\) is none of"),
        (
            {"prompts_per_step": 3, "samples_per_prompt": 3, "updates_per_rollout": 2},
            "does not divide a step's 9 samples",
        ),
    ],
)
def test_one_clear_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        TrainConfig.from_options(**options)
    assert "\n" not in str(error.value)


def test_the_ends_of_what_is_possible():
    config = TrainConfig(clip=0, clip_high=0, max_grad_norm=0, weight_decay=0, beta2=0, seed=2**32 - 1)
    assert config.seed == 4294967295 and TrainConfig(temperature=1e-3).temperature == 1e-3


def test_a_recipe_that_can_not_be(tmp_path):
    with pytest.raises(RecipeError, match="fp5"):
        TrainConfig.from_options(recipe="fp5")


@pytest.mark.parametrize(
    "text, message",
    [
        (b"- a\n", "expected lines of 'option: value'"),
        (b"steps: [\n", r"run.yaml, line 2: not YAML \(expected the node content, but found '<stream end>'\)"),
        (b"steps: 3\n\tlr: 4\n", "line 2: not YAML .*'.t' that cannot start any token"),
        (b"---\nsteps: 3\n---\nlr: 1\n", "line 3: not YAML .*another document"),
        (b"lr: !!python/name:os.system\n", "line 1: not YAML .*could not determine a constructor"),
        (b"? [1, 2]\n: 3\n", "line 1: not YAML .*unhashable key"),
        (b"\xff\xfe\x00bad", "not a text file"),
        (b"\x00\x01", "not a text file"),
        (b"[" * 3000, "nested too deeply"),
        (b"lrr: 1\n", r"unknown option 'lrr' \(did you mean 'lr'\?\)"),
        (b"1: 3\n", "unknown option 1; possible: "),
        (b"null: 3\n", "unknown option None; possible: "),
        (b"recipe: null\n", "recipe=None must be text"),
        (b"recipe: [mxfp4]\n", r"recipe=\['mxfp4'\] must be text"),
        (b"recipe: mxfp9\n", "recipe 'mxfp9': unknown base"),
        (b"steps: -3\n", "steps=-3 must be positive"),
        (b"steps: 2026-13-45\n", "steps='2026-13-45' must be a whole number"),
        (b"steps: !!int x\n", "can't make of its text"),
    ],
)
def test_a_file_that_says_nothing_useful(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as error:
        TrainConfig.from_options(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_what_an_option_has_wrong_is_not_the_files(tmp_path):
    path = write(tmp_path, "steps: 3\n")
    with pytest.raises(ConfigError, match=r"^lr=-1\.0 must"):
        TrainConfig.from_options(path, lr="-1")
    with pytest.raises(RecipeError, match=r"^recipe 'fp5'"):
        TrainConfig.from_options(path, recipe="fp5")
    assert TrainConfig.from_options(write(tmp_path, "steps: -3\n"), steps=3).steps == 3
    assert TrainConfig.from_options(write(tmp_path, "out: 2026-01-31\n")).out == "2026-01-31"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        TrainConfig.from_options(tmp_path / "no.yaml")


def test_batches_are_the_largest_divisor():
    config = TrainConfig(prompts_per_step=12, samples_per_prompt=8, updates_per_rollout=2, iterations=3, micro_batch=20)
    assert config.sequences == 96 and config.updates == 6
    assert config.batches("cpu") == (16, 3)  # 48 an update; 20 allows 16
    assert TrainConfig().batches("cuda") == (512, 1) and TrainConfig().batches("cpu") == (64, 8)
