"""Routing of an MoE under a quantization error: flips of the experts' choice, redundancy of their errors, replay.

On the unquantized policy's own completions, at every token whose logits one of their tokens was drawn from:

    topk_flip         share of (token, MoE layer) whose set of A chosen experts isn't the unquantized pass's; routers
                      themselves are never quantized, their inputs carry the error of all that came before
    topk_flip_local   the same where every decoder block is fed its unquantized input: its own attention's error only
    redundancy        R = 1 − ‖Σ g_k e_k‖² / Σ ‖g_k e_k‖², e_k the error of expert k's output for the unquantized input
                      and routing, g_k its gate: 0 for independent errors, 1 if they cancel, 1 − A if they are equal
    mixing_removed    1 − (1 − R) / (1 − R_y), R_y the same of the outputs instead of their errors: what summing the
                      experts takes off their *relative* error; 0 where errors add up just as outputs do
    replay_removed    1 − ‖err_replayed‖² / ‖err‖² of the model's logits (less their mean over the vocabulary), where
                      "replayed" sends each token where the unquantized pass did, with the treated gates (nn/replay.py)
    replay_removed_blocks, error_at_flips   the same of the MoE blocks' outputs; and the share of their error that lies
                      at tokens whose own set flipped there

Every figure is a ratio of sums over all tokens (R, the blocks' and the flips: of each layer, then averaged over the
layers), so that it equals what the layers' rows say; its interval is the jackknife's over prompts.

Theory (routing_theory.py): the flip rate that Gaussian router noise of the measured size gives, from the margins; and
R = 0. Source: ours, on what arXiv 2605.20402 says of MoE models: that they suffer less from the same error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxrl.nn.replay import moe_layers
from mxrl.probes.intervals import Mean, comparison, finite, jackknife, measure
from mxrl.probes.routing_pass import COLUMNS, Batch, Sums, add_treatment, base_pass
from mxrl.probes.routing_theory import drawn_flips, flip_probability, margins
from mxrl.probes.subject import ProbeError, Subject, blocks
from mxrl.probes.treatments import Treatment
from mxrl.probes.treatments import treatments as usual
from mxrl.rl.rollout import inference

USUAL = usual(("mxfp4", "mxfp4+mbs", "mxfp4+of", "mxfp4+mbs+of"))
BINS = 10  # of the margin, as many tokens in each


def routing(
    subject: Subject,
    treatments: Sequence[str | Treatment] = USUAL,
    *,
    samples: int = 1,
    draws: int = 8,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Flips, redundancy and replay under every treatment.

    samples: completions of every prompt, sampled by the unquantized policy. draws: of Gaussian noise on every token's
    router logits, for the prediction. Treatments without an error in the forward pass (bf16, …@backward) are left out,
    with a note; a figure that is 0 / 0 is left out too.
    Raises ProbeError for a model without routed experts, one whose tokens go to all of them, or nothing to measure;
    RoutingError for a router that isn't known; TreatmentError; NonFiniteError.
    """
    subject.need_moe("routing")
    layers = moe_layers(subject.model)
    asked = [Treatment.parse(t) for t in treatments]
    todo = [t for t in asked if t.recipe.quantizes and t.passes != "backward"]
    if not todo:
        raise ProbeError("routing: no treatment has an error in the forward pass; give it one, as mxfp4")
    active, experts = layers[0].router.top_k, layers[0].router.num_experts
    if active >= experts:
        raise ProbeError(f"routing: {subject.name} sends every token to all {experts} experts; nothing is chosen")
    batches = Batch.of(subject, subject.rollout(samples=samples), samples)
    sums = [Sums(len(subject.problems), len(layers), subject.device) for _ in todo]
    flips: list[list[Tensor]] = [[] for _ in todo]
    seen: list[Tensor] = []
    with inference(subject.model):
        for number, batch in enumerate(batches):
            base = base_pass(subject, layers, batch)
            seen.append(torch.stack(base.logits).cpu())
            for i, t in enumerate(todo):
                flips[i].append(add_treatment(subject, layers, batch, base, t, number, sums[i]))
                progress((number * len(todo) + i + 1) / (len(batches) * len(todo)))
    logits = torch.cat(seen, dim=1)  # of the routers, [L, N, E]
    margin = torch.stack([margins(layer, active) for layer in logits])  # [L, N]
    depth = {id(module): i for i, block in enumerate(blocks(subject.model)) for module in block.modules()}
    at = [depth[id(layer.block)] for layer in layers]
    result: dict[str, Any] = {
        "probe": "routing",
        "schema": 1,
        "subject": subject.about(),
        "settings": {
            "treatments": [str(t) for t in todo],
            "samples": samples,
            "draws": draws,
            "active": active,
            "tokens": logits.shape[1],
            "moe_layers": len(layers),
        },
        "measures": [],
        "theory": [],
        "layers": [],
        "curves": [margin_curve(margin, at)],
        "notes": [f"{t} has no error in the forward pass and is left out." for t in asked if t not in todo],
    }
    for i, t in enumerate(todo):
        columns = sums[i].columns()
        found = _figures(columns)
        noise = _columns(columns.sum(0))
        sigma, local = ((noise[name] / noise["tokens"]).sqrt().tolist() for name in ("noise", "noise_local"))
        generator = torch.Generator().manual_seed(subject.seed)
        pair = torch.stack([flip_probability(m, s) for m, s in zip(margin, sigma, strict=True)])
        drawn = torch.stack([drawn_flips(x, active, s, draws, generator) for x, s in zip(logits, sigma, strict=True)])
        result["measures"] += [measure(t, name, m, UNITS[name], values) for name, (m, values) in found.items()]
        result["theory"] += _theory(str(t), found, float(pair.mean()), float(drawn.mean()))
        result["layers"] += [
            {"treatment": str(t), "layer": at[j]}
            | {name: finite(float(values[j])) for name, values in layer_figures(columns.sum(0)).items()}
            | {
                "margin_median": float(margin[j].median()),
                "noise_sd": sigma[j],
                "noise_sd_local": local[j],
                "predicted_flip": float(pair[j].mean()),
                "drawn_flip": float(drawn[j].mean()),
                "predicted_flip_local": float(flip_probability(margin[j], local[j]).mean()),
            }
            for j in range(len(layers))
        ]
        result["curves"].append(flips_by_margin(str(t), margin, torch.cat(flips[i], dim=1), pair, drawn))
    return result


# --- figures from sums -----------------------------------------------------------------------------------------------

UNITS = {
    "topk_flip": "share of token × layer",
    "topk_flip_local": "share of token × layer",
    "top1_flip": "share of token × layer",
    "changed_experts": "experts a token and layer",
    "redundancy": "1 − ‖Σ g e‖² / Σ ‖g e‖²",
    "mixing_removed": "share of the relative error",
    "replay_removed": "share of the logits' squared error",
    "replay_removed_blocks": "share of the MoE blocks' squared error",
    "error_at_flips": "share of the MoE blocks' squared error",
}


def _columns(sums: Tensor) -> dict[str, Tensor]:
    """[..., len(COLUMNS)] by name."""
    return dict(zip(COLUMNS, sums.unbind(-1), strict=True))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return a / torch.where(b > 0, b, math.nan)


def layer_figures(sums: Tensor) -> dict[str, Tensor]:
    """Each layer's figures, [..., L], of sums [..., L, len(COLUMNS)]; NaN where there is nothing to divide by."""
    c = _columns(sums)
    mixed, outputs = _ratio(c["error_mixed"], c["error_apart"]), _ratio(c["output_mixed"], c["output_apart"])
    return {
        "topk_flip": _ratio(c["flipped"], c["tokens"]),
        "topk_flip_local": _ratio(c["flipped_local"], c["tokens"]),
        "top1_flip": _ratio(c["first"], c["tokens"]),
        "changed_experts": _ratio(c["changed"], c["tokens"]),
        "redundancy": 1 - mixed,
        "output_redundancy": 1 - outputs,
        "mixing_removed": 1 - _ratio(mixed, outputs),
        "relative_error": _ratio(c["error"], c["output"]),
        "replay_removed_blocks": 1 - _ratio(c["error_replayed"], c["error"]),
        "error_at_flips": _ratio(c["error_flipped"], c["error"]),
    }


def _figures(columns: Tensor) -> dict[str, tuple[Mean, list[float]]]:
    """Each metric of UNITS with its interval, and its value a prompt (jackknife); of sums [P, L, len(COLUMNS)]."""
    found = {}
    for name in UNITS:

        def figure(flat: Tensor, name: str = name) -> Tensor:
            sums = flat.unflatten(-1, columns.shape[1:])
            if name != "replay_removed":
                return layer_figures(sums)[name].nanmean(-1)
            c = _columns(sums[..., 0, :])
            return 1 - _ratio(c["logits_replayed"], c["logits"])

        m, values = jackknife(columns.flatten(1), figure)
        if math.isfinite(m.value):
            found[name] = m, values
    return found


def _theory(
    treatment: str, found: dict[str, tuple[Mean, list[float]]], pair: float, drawn: float
) -> list[dict[str, Any]]:
    predictions = (
        ("top-k flips, boundary pair", pair, "topk_flip", "mean of Φ(−m/(σ√2)): Gaussian noise, one σ a layer, on the "
         "last chosen and the first other expert"),
        ("top-k flips, drawn", drawn, "topk_flip", "the same noise drawn on all experts: where this fails, noise isn't "
         "Gaussian, or not of one size for all tokens, or not independent of the logits"),
        ("independent expert errors", 0.0, "redundancy", "above 0 the experts' errors cancel, below they add up"),
    )  # fmt: skip
    return [
        comparison(name, treatment, predicted, found[metric][0], "ours", note)
        for name, predicted, metric, note in predictions
        if metric in found
    ]


# --- curves ----------------------------------------------------------------------------------------------------------


def margin_curve(margin_LN: Tensor, at: Sequence[int]) -> dict[str, Any]:
    """Share of the tokens whose margin is below x, for up to six layers; at: the decoder block of each."""
    x = torch.linspace(0, float(margin_LN.double().flatten().sort().values[int(0.95 * (margin_LN.numel() - 1))]), 41)
    chosen = sorted({round(i * (len(at) - 1) / 5) for i in range(6)})
    series = {f"layer {at[i]}": (margin_LN[i] < x.unsqueeze(-1)).double().mean(-1).tolist() for i in chosen}
    return {"name": "margin", "x": x.tolist(), "series": series}


def flips_by_margin(
    treatment: str, margin_LN: Tensor, flips_LN: Tensor, pair_LN: Tensor, drawn_LN: Tensor
) -> dict[str, Any]:
    """Flip rates, measured and predicted, in BINS of the margin that hold as many (token, layer) each; x: its mean."""
    bins = [part for part in margin_LN.flatten().argsort(stable=True).tensor_split(BINS) if len(part)]

    def means(values: Tensor) -> list[float]:
        return [float(values.flatten()[part].double().mean()) for part in bins]

    series = {"measured": means(flips_LN), "boundary pair": means(pair_LN), "drawn": means(drawn_LN)}
    return {"name": "flips_by_margin", "treatment": treatment, "x": means(margin_LN), "series": series}
