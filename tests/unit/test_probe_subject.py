"""What a probe looks at: the unquantized policy, its prompts, and every way in which they can't be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

import mxrl
from mxrl.probes.subject import ProbeError, Subject, blocks, check_finite, open_subject
from mxrl.probes.treatments import treated
from mxrl.rl.policy import build_policy, char_tokenizer, save_policy
from mxrl.rl.rollout import inference, score
from mxrl.rl.tasks import TaskError
from mxrl.scan import NonFiniteError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("subject") / "tiny"
    save_policy(build_policy("dense", size="tiny"), char_tokenizer(), path, dtype=torch.float32)
    return path


def opened(folder: Path, **options: object) -> Subject:
    return open_subject(str(folder), "chain", **{"prompts": 4, "device": "cpu", **options})  # type: ignore[arg-type]


def test_subject_computes_as_the_model_that_was_saved(folder: Path) -> None:
    subject = opened(folder, prompts=3, max_new_tokens=5)
    ids = torch.tensor(subject.prompt_ids[:1])
    with torch.no_grad():
        expected = build_policy("dense", size="tiny").eval()(ids).logits
        assert torch.equal(subject.logits(ids, torch.ones_like(ids)), expected)
    written = subject.rollout(samples=2)
    assert written.completion_ids.shape[0] == 6 and len(subject.texts(written)) == 6
    again = score(subject.model, *written.inputs(), written.completion_ids.shape[1])
    assert float((again.logps - written.logps)[written.completion_mask].abs().max()) < 1e-4  # two orders of summation
    assert torch.equal(opened(folder, prompts=3, max_new_tokens=5).rollout(samples=2).logps, written.logps)
    with treated(subject.model, "mxfp4"):
        assert not torch.equal(subject.rollout(samples=2).logps, written.logps)
    about = subject.about()
    assert (about["layers"], about["hidden"], about["dtype"], about["prompts"]) == (2, 64, "float32", 3)
    assert about["experts"] == 0 and not subject.is_moe


def test_default_is_the_longest_careful_solution(folder: Path) -> None:
    from mxrl.rl.chain import solution

    subject = opened(folder, prompts=8)
    assert subject.max_new_tokens == max(len(solution(p)) for p in subject.problems) + 1
    assert {p.meta["group"] for p in subject.problems}


def test_what_a_probe_needs_is_said(folder: Path) -> None:
    subject = opened(folder)
    with pytest.raises(ProbeError, match="has 2 decoder blocks; a spread over depth takes at least 4"):
        subject.need_layers(4, "a spread over depth")
    subject.need_layers(2, "this")
    with pytest.raises(ProbeError, match="no routed experts, so there is nothing for the routing probe"):
        subject.need_moe("routing")
    assert len(blocks(subject.model)) == 2


@pytest.mark.parametrize(
    ("task", "options", "error", "match"),
    [
        (None, {}, ProbeError, "say what to ask it"),
        ("chain", {"prompts": 0}, ProbeError, "^prompts=0 must be at least 1$"),
        ("chains", {}, TaskError, "unknown task 'chains'"),
        ("chain:file", {}, TaskError, "takes no file, got 'file'"),
        ("chain", {"max_new_tokens": 600}, ProbeError, r"the 512 positions of .*tiny; --max-new-tokens \d+ is"),
        ("gsm8k:nowhere.jsonl", {}, TaskError, "no such file: nowhere.jsonl"),
        ("chain", {"device": "cuda:7"}, ValueError, "device 'cuda:7'"),
    ],
)
def test_bad_calls_in_one_line(folder: Path, task: str, options: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        open_subject(str(folder), task, **{"prompts": 2, "device": "cpu", **options})
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"^model '/nowhere' is no file or folder here, and no hub id"):
        open_subject("/nowhere", "chain", prompts=2, device="cpu")


def test_first_module_with_a_nan_is_named(folder: Path) -> None:
    subject = opened(folder)
    check_finite(subject)
    with torch.no_grad():
        subject.model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"output of 'model.layers.1.mlp.up_proj' has \d+ NaN among"):
        check_finite(subject)
    with inference(subject.model), pytest.raises(NonFiniteError, match=r"the logits of .*tiny have"):
        subject.logits(torch.tensor([[3, 4]]), torch.tensor([[1, 1]]))


def test_blocks_of_a_model_without_a_list() -> None:
    model = tiny_model("qwen3")
    mxrl.convert(model, "bf16")
    model.config.num_hidden_layers = 5
    with pytest.raises(ProbeError, match="keeps its 5 decoder blocks in no list"):
        blocks(model)
