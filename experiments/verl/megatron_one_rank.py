"""Megatron-core's layers, converted, against mxrl's Hugging Face layers: one rank, forward and backward, on a GPU.

    python experiments/verl/megatron_one_rank.py --out RESULT.json            # one H200: about a minute
    python experiments/verl/megatron_one_rank.py --device cpu --small         # to see that it runs
    python experiments/verl/megatron_one_rank.py --table RESULT.json          # the README's table

Widths of Qwen3-30B-A3B (16 of its 128 experts). For each layer: whether Q(w) has the same bits; how far output, input
gradient and weight gradient are apart (relative norm; 0 is bit-equal); milliseconds of forward and backward, Megatron's
layer unquantized, converted, and the Hugging Face layer. Megatron-core only: no TransformerEngine, apex, grouped_gemm.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import mxrl
from mxrl.nn import Operands, QuantizedLinear
from mxrl.nn.operands import quantize_operand
from mxrl.provenance import provenance

warnings.simplefilter("ignore")  # Megatron says what isn't installed

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe import experts as megatron_experts  # noqa: E402

from mxrl.integrations.megatron import (  # noqa: E402
    QuantizedGemm,
    convert_experts,
    expert_matrices,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="mxfp4+mbs+of")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small widths")
    parser.add_argument("--out", help="a file for the JSON, besides the terminal")
    parser.add_argument("--table", help="print such a file as a table, and do nothing else")
    args = parser.parse_args()
    if args.table:
        with open(args.table) as file:
            return print(table(json.load(file)))
    hidden, inner, experts, tokens, heads = (128, 64, 4, 64, 4) if args.small else (2048, 768, 16, 4096, 32)
    if args.device == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # type: ignore
    store = tempfile.mkdtemp()
    backend = "gloo" if args.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()

    result: dict[str, Any] = {
        "recipe": args.recipe,
        **provenance(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "torch", "transformers"),
        "megatron_core": __import__("megatron.core").core.__version__,
        "sizes": {"hidden": hidden, "moe_inner": inner, "experts": experts, "tokens": tokens},
        "layers": [],
    }
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        with torch.device(args.device):
            result["layers"] += compare(args.recipe, dtype, hidden, inner, experts, tokens, heads)
    dist.destroy_process_group()
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")


def table(result: dict[str, Any]) -> str:
    """The layers as a Markdown table; times as a ratio to the Hugging Face layers'."""
    lines = [
        "| layer | dtype | Q(w) | output | input gradient | weight gradient | time, × Hugging Face's |",
        "|" + "---|" * 7,
    ]
    for row in result["layers"]:
        apart = [f"{row[n]:.1e}" if row[n] else "equal" for n in ("output", "grad_input", "grad_weight")]
        same = "equal" if row["weights_equal"] else "differs"
        ratio = row["ms_megatron"] / row["ms_hugging_face"]
        lines.append(f"| {row['layer']} | {row['dtype']} | {same} | {' | '.join(apart)} | {ratio:.2f} |")
    return "\n".join(lines)


def compare(
    recipe: str, dtype: torch.dtype, hidden: int, inner: int, experts: int, tokens: int, heads: int
) -> list[dict[str, Any]]:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=inner,
        moe_ffn_hidden_size=inner,
        num_moe_experts=experts,
        moe_grouped_gemm=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    common: Any = dict(config=config, init_method=nn.init.normal_, bias=False, skip_bias_add=False)
    attention = hidden * 2  # Qwen3-30B-A3B: 32 heads of 128
    key = attention // 8
    shapes: dict[str, tuple[Any, list[int], int]] = {  # class, outputs of the Hugging Face layers, inputs
        "linear_qkv": (ColumnParallelLinear, [attention, key, key], hidden),
        "linear_proj": (RowParallelLinear, [hidden], attention),
        "linear_fc1": (ColumnParallelLinear, [3 * hidden, 3 * hidden], hidden),
        "linear_fc2": (RowParallelLinear, [hidden], 3 * hidden),
    }
    rows = []
    for name, (kind, outputs, inputs) in shapes.items():
        extra: Any = dict(gather_output=False) if kind is ColumnParallelLinear else dict(input_is_parallel=True)
        layer = kind(inputs, sum(outputs), **common, **extra)
        theirs = [QuantizedLinear(inputs, o, bias=False, dtype=dtype, recipe=recipe) for o in outputs]
        rows.append(linear(name, layer, theirs, recipe, spiky(tokens, inputs, dtype=dtype)))
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=dist.group.WORLD, expt_dp=dist.group.WORLD)
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    megatron_experts.gg.assert_grouped_gemm_is_available = lambda: None  # its library isn't needed by a converted layer
    for name, module in (
        ("SequentialMLP", megatron_experts.SequentialMLP(experts, config, submodules, groups)),
        ("GroupedMLP", megatron_experts.GroupedMLP(experts, config, groups)),
    ):
        rows.append(moe(name, module, recipe, spiky(tokens, hidden, dtype=dtype), experts, inner))
    return [{"layer": row.pop("layer"), "dtype": str(dtype).removeprefix("torch."), **row} for row in rows]


def linear(name: str, layer: Any, theirs: list[QuantizedLinear], recipe: str, x: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        layer.weight.copy_(torch.cat([t.weight for t in theirs]))
    dy = torch.randn(x.shape[0], layer.weight.shape[0], dtype=x.dtype)
    plain = timed(lambda: layer(x.detach().requires_grad_())[0].backward(dy))
    operands = Operands.of(mxrl.Recipe.parse(recipe))
    layer._forward_impl = QuantizedGemm(operands)
    wq = quantize_operand(layer.weight.detach(), operands.weight)
    same = torch.equal(wq, torch.cat([quantize_operand(t.weight.detach(), operands.weight) for t in theirs]))

    def ours() -> tuple[Tensor, ...]:
        layer.weight.grad = None
        inside = x.clone().requires_grad_()
        y, _ = layer(inside)
        y.backward(dy)
        return y.detach(), inside.grad, layer.weight.grad  # type: ignore[return-value]

    def reference() -> tuple[Tensor, ...]:
        inside = x.clone().requires_grad_()
        for t in theirs:
            t.weight.grad = None
        y = torch.cat([t(inside) for t in theirs], dim=-1)
        y.backward(dy)
        return y.detach(), inside.grad, torch.cat([t.weight.grad for t in theirs])  # type: ignore

    return {"layer": name, "weights_equal": same, **apart(ours, reference), "ms_plain": plain}


def moe(name: str, module: Any, recipe: str, x: Tensor, experts: int, inner: int) -> dict[str, Any]:
    tokens, hidden = x.shape
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=min(8, experts // 2)
    )
    active = config.num_experts_per_tok
    theirs: Any = Qwen3MoeExperts(config).to(x.dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.02)
    mxrl.convert(theirs, recipe)
    grouped = name == "GroupedMLP"
    with torch.no_grad():
        if grouped:
            for stored, weight in zip(expert_matrices(module), (theirs.gate_up_proj, theirs.down_proj), strict=True):
                stored.copy_(weight.mT)
        else:
            for e, expert in enumerate(module.local_experts):
                expert.linear_fc1.weight.copy_(theirs.gate_up_proj[e])
                expert.linear_fc2.weight.copy_(theirs.down_proj[e])
    convert_experts(module, recipe)
    index = torch.rand(tokens, experts).topk(active).indices
    gates = torch.rand(tokens, active).to(x.dtype)
    order = index.flatten().argsort(stable=True)
    counts, place = torch.bincount(index.flatten(), minlength=experts), order.argsort()
    dy = torch.randn(tokens, hidden, dtype=x.dtype)

    def ours() -> tuple[Tensor, ...]:
        module.zero_grad(set_to_none=True)
        inside = x.clone().requires_grad_()
        y, _ = module(inside[order // active], counts, gates.flatten()[order])
        y = y[place].view(tokens, active, hidden).sum(1)
        y.backward(dy)
        if grouped:
            w1 = module.weight1.grad.view(experts, hidden, -1).mT
        else:
            w1 = torch.stack([e.linear_fc1.weight.grad for e in module.local_experts])
        return y.detach(), inside.grad, w1  # type: ignore[return-value]

    def reference() -> tuple[Tensor, ...]:
        theirs.zero_grad(set_to_none=True)
        inside = x.clone().requires_grad_()
        y = theirs(inside, index, gates)
        y.backward(dy)
        return y.detach(), inside.grad, theirs.gate_up_proj.grad  # type: ignore[return-value]

    operands = Operands.of(mxrl.Recipe.parse(recipe))
    expected = quantize_operand(theirs.gate_up_proj.detach(), operands.weight)
    if grouped:
        got = quantize_operand(expert_matrices(module)[0].detach(), operands.weight, -2).mT
    else:
        own = [e.linear_fc1.weight.detach() for e in module.local_experts]
        got = torch.stack([quantize_operand(w, operands.weight) for w in own])
    return {"layer": name, "weights_equal": torch.equal(got, expected), **apart(ours, reference)}


def spiky(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal, with a few outliers, as activations have them."""
    x = torch.randn(*shape)
    return (x * (1 + 20 * (x > 3))).to(dtype)


def apart(ours: Callable[[], tuple[Tensor, ...]], reference: Callable[[], tuple[Tensor, ...]]) -> dict[str, float]:
    names = ("output", "grad_input", "grad_weight")
    found = {
        name: float((a.double() - b.double()).norm() / b.double().norm())
        for name, a, b in zip(names, ours(), reference(), strict=True)
    }
    return {**found, "ms_megatron": timed(ours), "ms_hugging_face": timed(reference)}


def timed(call: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds, after two calls to warm up."""
    times = []
    for _ in range(repeats + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(1000 * sorted(times[2:])[repeats // 2], 3)


if __name__ == "__main__":
    main()
