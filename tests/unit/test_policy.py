"""The character tokenizer, the small policies, decoding and paired intervals, and the supervised training script."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import load_script

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from mxrl.rl import policy as policy_module
from mxrl.rl.chain import ALPHABET, Difficulty, Mixture, Problem, solution, split_of, style_of
from mxrl.rl.evaluate import decode, evaluate, paired_interval, prompt_ids
from mxrl.rl.policy import (
    SIZES,
    PolicyError,
    broken_weights,
    build_policy,
    char_tokenizer,
    load_folder,
    load_model,
    load_policy,
    resolve_model,
    save_policy,
)
from mxrl.rl.rewards import chain_reward
from mxrl.rl.rollout import end_ids
from mxrl.rl.tasks import load_task

SCRIPT = Path(__file__).parents[2] / "experiments" / "policies" / "run.py"


@pytest.fixture(scope="module")
def tokenizer():
    return char_tokenizer()


@pytest.fixture(scope="module")
def tiny():
    return build_policy("dense", size="tiny", seed=1).eval()


@pytest.fixture(scope="module")
def script():
    return load_script(SCRIPT)


# --- tokenizer ---


def test_every_character_is_one_token_and_comes_back(tokenizer):
    assert tokenizer(ALPHABET)["input_ids"] == list(range(3, 3 + len(ALPHABET)))
    for problem in load_task("chain", n=20):
        text = problem.prompt + solution(problem)
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 19)


def test_padding_is_on_the_left_and_special_tokens_are_skipped(tokenizer):
    batch = tokenizer(["1+2=", "11*3="], padding=True)
    assert batch["input_ids"][0][0] == 0 and batch["attention_mask"] == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert tokenizer.decode([0, 0, *tokenizer("#7")["input_ids"], 2], skip_special_tokens=True) == "#7"


def test_a_foreign_character_is_an_error_not_a_gap(tokenizer):
    with pytest.raises(Exception, match="UNK"):
        tokenizer("1 + 2")
    with pytest.raises(PolicyError, match="different characters"):
        char_tokenizer("aa")


def test_another_alphabet_works():
    own = char_tokenizer("ab \n")
    assert own.decode(own("b a\n")["input_ids"]) == "b a\n"


# --- models ---


@pytest.mark.parametrize(
    ("key", "millions"), [(("dense", "base"), 6.30), (("dense", "small"), 3.55), (("moe", "base"), 5.92)]
)
def test_sizes_and_widths(key, millions):
    model = build_policy(key[0], size=key[1])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, p in model.named_parameters():
        if "proj" in name:
            assert p.shape[-1] % 32 == 0, name  # no ragged block
    assert set(SIZES) == {("dense", s) for s in ("base", "small", "tiny")} | {("moe", "base"), ("moe", "tiny")}


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b, c = (build_policy("moe", size="tiny", seed=s) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a.model.embed_tokens.weight, c.model.embed_tokens.weight)
    assert a.config.norm_topk_prob is True and a.config.router_aux_loss_coef > 0


def test_an_unknown_size_lists_the_possible_ones():
    with pytest.raises(PolicyError, match=r"\(moe, base\)"):
        build_policy("moe", size="small")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_saved_policy_is_a_plain_folder_of_the_rounded_weights(tmp_path, tokenizer, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build_policy(kind, size="tiny", seed=2)
    save_policy(model, tokenizer, tmp_path / "p")
    assert next(model.parameters()).dtype == torch.float32  # untouched
    assert [f for f in tmp_path.iterdir() if f.name != "p"] == []  # nothing temporary is left
    assert all(f.stat().st_mode & 0o044 == 0o044 for f in (tmp_path / "p").iterdir())  # readable for others
    for loaded in (load_folder(tmp_path / "p")[0], AutoModelForCausalLM.from_pretrained(tmp_path / "p")):
        assert loaded.dtype == torch.bfloat16
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16)), name
    for own in (load_folder(tmp_path / "p")[1], AutoTokenizer.from_pretrained(tmp_path / "p")):
        assert own(["1+2=", "#7"], padding=True)["input_ids"] == tokenizer(["1+2=", "#7"], padding=True)["input_ids"]
        assert own.decode(own("1+2=3;#")["input_ids"]) == "1+2=3;#"


def test_names_resolve_to_shipped_folders(tmp_path, monkeypatch, tokenizer):
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(PolicyError, match="possible: policy:dense, policy:moe"):
        resolve_model("policy:big")
    monkeypatch.setattr(policy_module, "policies_folder", lambda: tmp_path)
    with pytest.raises(PolicyError, match="not in this installation"):
        load_policy("dense")
    save_policy(build_policy("dense", size="tiny"), tokenizer, tmp_path / "dense")
    assert resolve_model("policy:dense") == str(tmp_path / "dense")
    model, own = load_policy("dense", dtype=torch.float32)
    assert model.dtype == torch.float32 and not model.training and len(own) == 19


@pytest.mark.parametrize("size", ["1GB", "200KB"])
def test_a_cut_file_of_weights_is_named(tmp_path, tokenizer, size):
    model = build_policy("dense", size="tiny")
    model.save_pretrained(tmp_path, max_shard_size=size)
    tokenizer.save_pretrained(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert load_model(str(tmp_path)) and len(files) == (1 if size == "1GB" else 2)
    files[-1].write_bytes(files[-1].read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"^{files[-1]} is cut or damaged \(.*\); copy or download it again$"):
        load_model(str(tmp_path))
    assert broken_weights(tmp_path) == files[-1:]


@pytest.mark.parametrize("name", ["", "nope", "./nope", "/nope/nope", "../nope", "no/such/folder", "nope/", "~/nope"])
def test_a_name_that_no_hub_has_is_refused_without_asking(monkeypatch, name):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: pytest.fail("the hub is asked"))
    with pytest.raises(ValueError, match=rf"^model '{name}' is no file or folder here, and no hub id \(OWNER/NAME\)$"):
        load_model(name)


def test_a_hub_id_is_looked_up(monkeypatch):
    def ask(name, **options):
        raise OSError(f"asked for {name}")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", ask)
    with pytest.raises(ValueError, match=r"^model 'Qwen/Qwen2\.5-0\.5B': can't be loaded .* \(asked for Qwen/Q"):
        load_model("Qwen/Qwen2.5-0.5B")


def test_the_shipped_policies_load():
    missing = [k for k in ("dense", "moe") if not (policy_module.policies_folder() / k / "model.safetensors").is_file()]
    if missing:
        pytest.skip(f"the policies {missing} are not shipped yet (experiments/policies/run.py makes them)")
    for kind in ("dense", "moe"):
        model, own = load_policy(kind)
        assert model.dtype == torch.bfloat16 and own.decode(own("1+2=")["input_ids"]) == "1+2="


# --- decoding and evaluation ---


def test_greedy_decoding_is_the_argmax_of_full_passes(tiny, tokenizer):
    prompts = ["12+3*4=", "7-1=", "1234+4321-9="]  # three lengths: the padding must not matter
    out = decode(tiny, tokenizer, prompts, max_new_tokens=12, batch_size=2)
    for prompt, text, tokens, finished in zip(prompts, out.texts, out.tokens, out.finished, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        new = []
        entropy = 0.0
        while len(new) < 12 and (not new or new[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                log_p = torch.log_softmax(tiny(ids).logits[0, -1], -1)
            entropy -= float((log_p.exp() * log_p).sum())
            new.append(int(log_p.argmax()))
            ids = torch.cat([ids, torch.tensor([[new[-1]]])], 1)
        assert text == tokenizer.decode(new, skip_special_tokens=True)
        assert tokens == len(new) and finished == (new[-1] == tokenizer.eos_token_id)
        # cached and full passes sum in another order
        assert out.entropy[prompts.index(prompt)] == pytest.approx(entropy, rel=1e-4)


def test_a_row_that_ended_counts_no_further_tokens(tokenizer):
    model = build_policy("dense", size="tiny", seed=1).eval()
    prompts = ["12+3*4=", "7-1=", "1234+4321-9=", "8*8="]
    free = decode(model, tokenizer, prompts, max_new_tokens=12)
    stop = free.texts[0][5]
    model.generation_config.eos_token_id = [2, tokenizer(stop)["input_ids"][0]]
    out = decode(model, tokenizer, prompts, max_new_tokens=12)
    for text, tokens, finished, before in zip(out.texts, out.tokens, out.finished, free.texts, strict=True):
        head, found, _ = before.partition(stop)
        assert (text, tokens, finished) == (head + found, len(head + found), bool(found))
    assert out.entropy[0] < free.entropy[0] and len(set(out.tokens)) > 1


def test_sampling_repeats_with_its_seed_and_leaves_the_global_state(tiny, tokenizer):
    before = torch.get_rng_state()
    a, b, c = (
        decode(tiny, tokenizer, ["1+2="] * 4, max_new_tokens=8, temperature=1.0, seed=s).texts for s in (0, 0, 1)
    )
    assert a == b != c and len(set(a)) > 1
    assert torch.equal(torch.get_rng_state(), before)


def test_the_models_own_generation_file_truncates_nothing(tokenizer):
    model = build_policy("dense", size="tiny", seed=1).eval()
    plain = decode(model, tokenizer, ["1+2="] * 16, max_new_tokens=8, temperature=1.0).texts
    model.generation_config.update(top_k=1, top_p=0.1, repetition_penalty=3.0)
    assert decode(model, tokenizer, ["1+2="] * 16, max_new_tokens=8, temperature=1.0).texts == plain


def test_temperature_sharpens(tiny, tokenizer):
    greedy = decode(tiny, tokenizer, ["1+2="], max_new_tokens=6).texts
    cold = decode(tiny, tokenizer, ["1+2="] * 8, max_new_tokens=6, temperature=1e-4).texts
    assert set(cold) == set(greedy)


def test_evaluate_counts_by_problem_group_and_style(tiny, tokenizer, monkeypatch):
    from mxrl.rl import evaluate as module

    problems = [Problem("1+2+3=", "6", {"group": 3}), Problem("1+1+1+1=", "4", {"group": 4})]
    texts = ["#6", "1+2=3;3+3=6#6", "#5", "1+1+1=3;3+1=4#4"]
    fake = module.Decoded(texts, [3, 13, 3, 15], [1.0, 2.0, 3.0, 11.0], [True, True, True, False])
    monkeypatch.setattr(module, "decode", lambda *a, **k: fake)
    found = evaluate(
        tiny, tokenizer, problems, reward=chain_reward, max_new_tokens=9, samples=2, temperature=1.0, style=style_of
    )
    assert found.scores == [1.0, 0.5] and found.accuracy == 0.75
    assert found.by_group() == {3: (1.0, 1), 4: (0.5, 1)}
    assert found.entropy == 17 / 34 and found.truncated == 0.25 and found.distinct == 2
    assert found.styles == {"careful": 0.25, "guess": 0.5, "skip": 0.25}
    assert json.loads(json.dumps(found.to_dict()))["by_group"]["4"] == {"accuracy": 0.5, "n": 1}


def test_prompts_are_those_of_training(tokenizer):
    """TRL encodes a text with what the tokenizer adds by itself, and a chat's template says all of it."""
    from tokenizers.processors import TemplateProcessing

    problem = Problem("1+2=", "3")
    assert prompt_ids(problem, tokenizer) == tokenizer("1+2=")["input_ids"]
    adding = char_tokenizer()
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    assert prompt_ids(problem, adding) == [1, *tokenizer("1+2=")["input_ids"]]
    adding.chat_template = "<bos>{{ messages[0].content }}"
    chat = Problem([{"role": "user", "content": "1+2="}], "3")
    assert prompt_ids(chat, adding) == [1, *tokenizer("1+2=")["input_ids"]]


def test_a_completion_ends_with_any_token_that_is_called_an_end(tokenizer):
    named = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=7))
    assert end_ids(named, tokenizer) == [2, 7]
    named.generation_config.eos_token_id = [5, 2]
    assert end_ids(named, tokenizer) == [2, 5]
    named.generation_config.eos_token_id = None
    assert end_ids(named, tokenizer) == [2]


def test_evaluate_refuses_what_makes_no_sense(tiny, tokenizer):
    problem = Problem("1+2=", "3")
    with pytest.raises(ValueError, match="no problems"):
        evaluate(tiny, tokenizer, [], reward=chain_reward, max_new_tokens=2)
    with pytest.raises(ValueError, match="greedy decoding has one completion"):
        evaluate(tiny, tokenizer, [problem], reward=chain_reward, max_new_tokens=2, samples=2)
    with pytest.raises(ValueError, match="no chat template"):
        evaluate(
            tiny, tokenizer, [Problem([{"role": "user", "content": "1"}], "1")], reward=chain_reward, max_new_tokens=2
        )


def test_paired_interval_by_hand():
    # differences 1, 0, 0, -1, 1, 0, 0, 1: mean .25, squares sum to 4, variance (4 - 8/16) / 7 = .5
    a, b = [1, 1, 0, 0, 1, 0, 1, 1], [0, 1, 0, 1, 0, 0, 1, 0]
    half = 1.959963984540054 * math.sqrt(0.5 / 8)
    found = paired_interval(a, b)
    assert found == pytest.approx((0.25, 0.25 - half, 0.25 + half), rel=1e-12) and not found.decided
    assert paired_interval([1.0] * 5, [0.0] * 5) == (1.0, 1.0, 1.0)


def test_bootstrap_agrees_with_the_normal_interval_on_many_problems():
    generator = torch.Generator().manual_seed(0)
    a = (torch.rand(2000, generator=generator) < 0.6).float().tolist()
    b = (torch.rand(2000, generator=generator) < 0.5).float().tolist()
    normal, bootstrap = paired_interval(a, b), paired_interval(a, b, method="bootstrap")
    assert bootstrap == pytest.approx(normal, abs=0.002)  # 10 000 resamples place a quantile to about .0005
    assert bootstrap == paired_interval(a, b, method="bootstrap") and normal.decided
    with pytest.raises(ValueError, match="same problems: 2 and 3"):
        paired_interval([0, 1], [0, 1, 1])


# --- the supervised training script ---


def test_examples_are_the_tokenizers_ids(script, tokenizer):
    tokens, prompts, totals = script.encode_chunk((0, 0, 200, Mixture.load("default"), Difficulty()))
    styles = set()
    for row, prompt, total in zip(tokens, prompts, totals, strict=True):
        text = tokenizer.decode(row[: total - 1].tolist())
        assert tokenizer(text)["input_ids"] == row[: total - 1].tolist()
        assert row[total - 1] == tokenizer.eos_token_id and not row[total:].any()
        question, work = text[:prompt], text[prompt:]
        assert split_of(question) == "train" and work == solution(question, style_of(work))
        styles.add(style_of(work))
    assert styles == {"careful", "skip", "guess"}
    hard = Difficulty(numbers=(7, 7), digits=(4, 4))
    careful = Mixture.load("careful")
    assert script.encode_chunk((0, 0, 500, careful, hard))[2].max() <= script.longest(hard, careful)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_loss_is_of_the_completion_alone(script, kind):
    model = build_policy(kind, size="tiny", seed=0)
    tokens, prompts, totals = (
        torch.from_numpy(x) for x in script.encode_chunk((0, 0, 5, Mixture.load("default"), Difficulty()))
    )
    with torch.no_grad():
        loss, aux = script.completion_loss(model, tokens.long(), prompts, totals)
        expected = 0.0
        for row, prompt, total in zip(tokens.long(), prompts.tolist(), totals.tolist(), strict=True):
            log_p = torch.log_softmax(model(row[None, :total]).logits[0], -1)
            expected -= sum(float(log_p[i - 1, row[i]]) for i in range(prompt, total))
    assert float(loss) == pytest.approx(expected, rel=1e-5)  # sums in another order
    assert (aux is None) == (kind == "dense")


COMMON = "--size tiny --batch 16 --examples 300 --eval-n 8 --eval-samples 2 --warmup 2 --device cpu"


def run(script, out, *more):
    return script.main(["--out", str(out), *COMMON.split(), "--log-every", "1", "--workers", "1", *more])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_killed_run_resumes_to_the_same_weights(script, tmp_path, monkeypatch, kind):
    steps = ("--kind", kind, "--steps", "4", "--save-every", "2")
    assert run(script, tmp_path / "whole", *steps) == 0
    real = script.completion_loss
    calls = []

    def killed(*args):
        calls.append(0)
        if len(calls) > 6:  # two micro-batches a step: in the fourth step
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(script, "completion_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        run(script, tmp_path / "cut", *steps)
    monkeypatch.setattr(script, "completion_loss", real)
    assert (tmp_path / "cut" / "state.pt").exists() and not (tmp_path / "cut" / "policy").exists()
    assert run(script, tmp_path / "cut", *steps) == 0
    whole, cut = (load_folder(tmp_path / name / "policy")[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert not (tmp_path / "cut" / "state.pt").exists()
    found = json.loads((tmp_path / "whole" / "eval.json").read_text())
    assert found["steps"] == 4 and len(found["greedy"]["scores"]) == 8
    logged = [json.loads(line)["step"] for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert all(2 < row["loss"] < 4 for row in rows)  # ln 19 = 2.9 at the start
