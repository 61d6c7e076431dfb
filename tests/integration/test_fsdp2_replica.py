"""Rollouts of a model that FSDP2 has sharded: on two gloo ranks, a replica holds and draws what one process does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RANKS, sharded, spawn
from tiny_models import VOCAB, tiny_model, tokens
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import mxrl
from mxrl.nn import RolloutError, aqn_noise, quantized_layers, rollout_weights, shared_weights
from mxrl.nn.replica import Replica
from mxrl.rl.chain import Problem
from mxrl.rl.engine_slots import EngineError, unsupported
from mxrl.rl.evaluate import Evaluation, evaluate
from mxrl.rl.policy import build_policy, char_tokenizer
from mxrl.rl.rewards import chain_reward
from mxrl.rl.rollout import Rollout, sample

# (model, recipe): tied embeddings and biases; experts; transposed experts with biases; adapters
CASES = {
    "dense": ("qwen2", "mxfp4+mbs+of+aqn"),
    "moe": ("qwen3_moe", "mxfp4+aqn"),
    "transposed": ("gpt_oss", "nvfp4+aqn+aqn_placement=after"),
    "norms": ("qwen3", "mxfp4+aqn+aqn_target=norm"),
    "lora": ("qwen3", "mxfp4+aqn"),
    "bf16": ("qwen3_moe", "bf16"),
}
DRAWN = ("dense", "moe", "lora", "bf16")  # gpt-oss has sliding windows, which the engine doesn't take
BATCH = tokens(batch=4, length=8)
# one of the longest prompts in each rank's half: the cache has as many places as in one process
EQUAL = [[7 + i, *range(5, 9 + i % 2)] for i in range(8)]
RAGGED = [[5], [6, 7], [8, 9, 10, 11], [12, 13], *[[20 + i] * (12 - i) for i in range(4)]]
SLOTS = len(EQUAL) // RANKS
NOISE = 1e-5  # float32 sums in another order, as in tests/unit/test_engine.py

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def build(case: str) -> Any:
    family, recipe = CASES[case]
    model: Any = tiny_model(family)
    mxrl.convert(model, recipe)
    if case == "lora":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = peft.get_peft_model(model, config)
    return model.eval()


def contents(model: nn.Module) -> dict[str, Tensor]:
    """What the layers hold, and every parameter as the model has it."""
    out: dict[str, Tensor] = {}
    for layer in quantized_layers(model):
        for name in layer.weights:
            weight = layer.module.held if layer.is_linear else layer.module.mxrl_state.held[name]
            out[f"held {layer.name}.{name}"] = weight.value.clone()
    quantized = {id(layer.parameter(name)) for layer in quantized_layers(model) for name in layer.weights}
    rest = {name: p.detach().clone() for name, p in model.named_parameters() if id(p) not in quantized}
    return out | rest


def draw(model: Any, prompts: list[list[int]], **options: Any) -> Rollout:
    options = {"max_new_tokens": 10, "eos_token_id": 2, "pad_token_id": 0, "seed": 3, **options}
    return sample(model, prompts, engine="slots", batch_size=SLOTS, **options)


def rollouts(model: Any, rank: int = 0, ranks: int = 1) -> dict[str, Rollout]:
    """This rank's share of the prompts, greedily and drawn; `equal`: nothing ends before the last token."""
    size = len(EQUAL) // ranks
    rows = slice(rank * size, rank * size + size)
    found = {}
    for name, prompts, ends in (("equal", EQUAL, VOCAB), ("ragged", RAGGED, list(range(3, VOCAB, 3)))):
        for greedy in (False, True):
            got = draw(model, prompts[rows], eos_token_id=ends, greedy=greedy, first_row=rows.start)
            found[f"{name} {'greedy' if greedy else 'drawn'}"] = got
    return found


def measure(case: str, model: Any, block: Callable[..., Any], inside: Any, rank: int = 0, ranks: int = 1) -> dict:
    """All that is compared; `block` gives the model `inside` the weights of `model`."""
    out: dict[str, Any] = {}
    recipe = CASES[case][1]
    with torch.no_grad(), block(model, aqn_noise(recipe, 5, 1, 3)) as report:
        out["contents"] = contents(inside)
        out["logits"] = inside(BATCH).logits
        out["report"] = (report.sigma, report.layers)
        if case in DRAWN:
            out["rollouts"] = rollouts(inside, rank, ranks)
            if ranks == 1:
                out["shares"] = [rollouts(inside, share, RANKS) for share in range(RANKS)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), block(model, dtype=torch.bfloat16):
        out["autocast"] = inside(BATCH).logits
    # the whole batch on every rank: the mean of equal gradients is that gradient, so the step is one process's
    nn.functional.cross_entropy(model(BATCH).logits[:, :-1].flatten(0, 1), BATCH[:, 1:].flatten()).backward()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    optimizer.step()
    with torch.no_grad(), block(model, aqn_noise(recipe, 5, 2, 3)):
        out["stepped"] = contents(inside)
        out["stepped logits"] = inside(BATCH).logits
    return out


class InTurn:
    """`block` of a replica, whose inside and end each rank goes through alone, while the other waits at a file.

    Were there one collective in it, the ranks would wait for each other, until gloo gives up.
    """

    def __init__(self, replica: Replica, rank: int, folder: Path, case: str):
        self.replica, self.rank, self.folder, self.case = replica, rank, folder, case
        self.count = 0

    @contextmanager
    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.count += 1
        with self.replica.filled(*args, **kwargs) as report:
            assert not any(isinstance(p, DTensor) or p.is_meta for p in self.replica.model.parameters())
            assert self.case not in DRAWN or unsupported(self.replica.model) is None
            if self.rank == 1:
                self.wait(0)
            yield report
        layers = quantized_layers(self.replica.model)
        assert all(p.is_meta for p in self.replica.model.parameters()) and not any(layer.holds for layer in layers)
        self.file(self.rank).touch()
        if self.rank == 0:
            self.wait(1)

    def file(self, rank: int) -> Path:
        return self.folder / f"{self.case}.{self.count}.{rank}.through"

    def wait(self, rank: int) -> None:
        while not self.file(rank).exists():
            time.sleep(0.005)


def evaluation(model: Any, group: Any = None) -> list[Evaluation]:
    problems = [Problem("1+2+3=", "6", {"group": 3}), Problem("4+5=", "9", {"group": 2}), Problem("7+1=", "8")]
    options: dict[str, Any] = dict(reward=chain_reward, max_new_tokens=5, group=group, batch_size=2)
    few = evaluate(model, char_tokenizer(), problems[:1], **options)  # fewer than ranks
    return [few, evaluate(model, char_tokenizer(), problems, samples=3, temperature=1.0, seed=4, **options)]


def build_small() -> Any:
    model = build_policy("dense", size="tiny", seed=1).eval()
    mxrl.convert(model, "bf16")
    return model


def work(rank: int, mesh: Any, folder: Path) -> None:
    for case in CASES:
        model = build(case)
        replica = Replica(model)
        sharded(model, mesh)
        in_turn = InTurn(replica, rank, folder, case)
        torch.save(measure(case, model, in_turn, replica.model, rank, RANKS), folder / f"{case}.{rank}.pt")

    model = build_small()
    replica = Replica(model)
    sharded(model, mesh)
    with replica.filled(model):
        torch.save(evaluation(replica.model, dist.group.WORLD), folder / f"evaluation.{rank}.pt")

    # the blocks that training has around it, and what must be refused on every rank alike
    model = build("moe")
    replica = Replica(model)
    sharded(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(EngineError, match=r"sharded by FSDP2.*Replica"):
        draw(model, EQUAL)
    with pytest.raises(RolloutError, match="make the replica before fully_shard"):
        Replica(model)
    with shared_weights(model) as shared, torch.no_grad():
        model(BATCH)  # leaves the root gathered, in bf16
        computed = shared.computed
        with replica.filled(model, dtype=torch.bfloat16):
            embedding = replica.model.model.embed_tokens.weight
            assert embedding.dtype == torch.float32 and torch.equal(embedding, build("moe").model.embed_tokens.weight)
            assert shared.computed == computed and shared.reused == computed > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(BATCH).logits.sum().backward()
    with pytest.raises(RolloutError, match="changed inside"), replica.filled(model):
        optimizer.step()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replica")
    spawn(work, folder)
    return folder


def load(folder: Path, case: str) -> list[dict]:
    return [torch.load(folder / f"{case}.{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone() -> Callable[[str], dict]:
    known: dict[str, dict] = {}

    def measured(case: str) -> dict:
        if case not in known:
            model = build(case)
            known[case] = measure(case, model, rollout_weights, model)
        return known[case]

    return measured


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_the_bits_of_one_process(case, folder, alone):
    ranks, one = load(folder, case), alone(case)
    for rank in ranks:
        assert rank["report"] == one["report"]
        for when in ("contents", "stepped"):
            assert rank[when].keys() == one[when].keys() and sum("held" in name for name in one[when]) > 10
            assert all(torch.equal(rank[when][name], value) for name, value in one[when].items()), when
        for kind in ("logits", "autocast", "stepped logits"):
            assert torch.equal(rank[kind], one[kind]), kind
    changed = [name for name, value in one["contents"].items() if not torch.equal(value, one["stepped"][name])]
    assert len(changed) > 10  # the step did something


@pytest.mark.parametrize("case", DRAWN)
@pytest.mark.parametrize("how", ["drawn", "greedy"])
def test_two_ranks_draw_what_one_process_draws(case, how, folder, alone):
    """Bit for bit, quantized or not: no row ends early, so that one process decodes rank 0's rows and then rank 1's.

    With the slots of a rank, every GEMM then has the shape that it has on the rank, and sums in the same order.
    """
    ranks, one = ([x["rollouts"][f"equal {how}"] for x in (*load(folder, case), alone(case))][i] for i in (slice(2), 2))
    assert one.completion_ids.shape == (8, 10) and one.completion_mask.all()
    for name in ("completion_ids", "logps", "entropies", "argmax"):
        assert torch.equal(torch.cat([getattr(rank, name) for rank in ranks]), getattr(one, name)), name
    assert len({tuple(row) for row in one.completions()}) == 8
    assert (one.argmax == one.completion_ids).all() == (how == "greedy")


@pytest.mark.parametrize("how", ["drawn", "greedy"])
def test_ranks_that_decode_different_numbers_of_steps(how, folder, alone):
    """Without a 4-bit threshold that the last bit of a sum could cross: rows end, are refilled and dropped at other
    times than in one process, so that GEMMs have other shapes; the tokens are the same, float32 rounding apart."""
    ranks, one = (
        [x["rollouts"][f"ragged {how}"] for x in load(folder, "bf16")],
        alone("bf16")["rollouts"][f"ragged {how}"],
    )
    completions = [rank.completions() for rank in ranks]
    assert list(chain(*completions)) == one.completions()
    lengths = [max(map(len, rows)) for rows in completions]
    assert lengths[0] != lengths[1] and len({len(row) for row in one.completions()}) > 2
    logps = [list(chain(*(rollout.logp_lists() for rollout in part))) for part in (ranks, [one])]
    for ours, theirs in zip(*logps, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=NOISE)


@pytest.mark.parametrize("case", DRAWN)
def test_a_rank_draws_its_share_as_one_process_draws_that_share(case, folder, alone):
    """Bit for bit, with rows that end when they will: the same prompts in the same slots give the same schedule."""
    for ours, theirs in zip(load(folder, case), alone(case)["shares"], strict=True):
        for name, rollout in ours["rollouts"].items():
            columns = zip(vars(rollout).values(), vars(theirs[name]).values(), strict=True)
            assert all(torch.equal(a, b) for a, b in columns), name


def test_an_evaluation_of_all_ranks_is_that_of_one_process(folder):
    with rollout_weights(model := build_small()):
        few, many = evaluation(model)
    for ours in load(folder, "evaluation"):
        assert ours[0] == few
        assert ours[1].completions == many.completions and ours[1].scores == many.scores
        assert ours[1].entropy == pytest.approx(many.entropy, abs=NOISE)
        assert (ours[1].styles, ours[1].mean_tokens, ours[1].groups) == (many.styles, many.mean_tokens, many.groups)
    assert len({text for row in many.completions for text in row}) > 5
