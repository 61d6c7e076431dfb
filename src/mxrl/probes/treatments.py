"""What a probe does to a model: a recipe, or some components of its error, in the forward pass, the backward, or both.

    mxfp4                   the recipe itself (any of mxrl.recipes' grammar)
    mxfp4@scale             only e_scale is added to weights and activations; also @deadzone, @grid
    mxfp4@-scale            all but e_scale: one component left out
    mxfp4@~scale            Gaussian noise with e_scale's energy in its place: the control
    mxfp4@scale@forward     in the forward pass only, gradients through the master weights; also @backward; both without

One component alone says what it *can* do, one left out says what it *does* in company, and noise of the same energy
says whether its structure matters or only its size (‖e_scale‖² alone exceeds the whole error, see mxrl.decompose).
Components split the weights' and the activations' errors alike, each along its contraction axis.

Source: the components are arXiv 2605.20402's; leaving out and the energy-matched control are ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mxrl.nn import forget_activations, quantized_layers
from mxrl.nn.injected import Injected
from mxrl.nn.operands import Operands, Quantizer, RolloutError
from mxrl.ops.inject import COMPONENTS
from mxrl.recipes import Recipe

PASSES = ("both", "forward", "backward")
BASELINE = "bf16"


class TreatmentError(ValueError):
    """A treatment that can't be: the message says what is possible."""


@dataclass(frozen=True)
class Treatment:
    """recipe; components of its error that are let through; control: noise of their energy instead; passes.

    All three components are the recipe itself, computed as training and rollout compute it.
    """

    recipe: Recipe
    components: frozenset[str] = frozenset(COMPONENTS)
    control: bool = False
    passes: str = "both"

    @classmethod
    def parse(cls, text: str | Treatment) -> Treatment:
        """The grammar above. Raises TreatmentError or RecipeError, naming what is wrong and what is possible."""
        if isinstance(text, Treatment):
            return text
        head, *marks = text.split("@")
        recipe, components, control, passes = Recipe.parse(head), frozenset(COMPONENTS), False, "both"
        if recipe.aqn is not None or recipe.skip:
            raise TreatmentError(f"'{text}': a probe's treatment takes no aqn and no skip; leave them out of '{head}'")
        if marks and not recipe.quantizes:
            raise TreatmentError(f"'{text}': {recipe} has no error to take apart")
        for mark in marks:
            name = mark.lstrip("-~")
            if mark in PASSES[1:] and passes == "both":
                passes = mark
            elif name in COMPONENTS and components == frozenset(COMPONENTS) and len(mark) - len(name) <= 1:
                components = frozenset(COMPONENTS) - {name} if mark[0] == "-" else frozenset({name})
                control = mark[0] == "~"
            elif mark == "~" and components == frozenset(COMPONENTS):
                control = True
            else:
                raise TreatmentError(
                    f"treatment '{text}': can't read '@{mark}'; possible: @NAME, @-NAME, @~NAME with NAME of "
                    f"{', '.join(COMPONENTS)}, @~ (noise like the whole error), and @forward or @backward, each once"
                )
        return cls(recipe, components, control, passes)

    def __str__(self) -> str:
        mark = "~" if self.control else ""
        if len(self.components) == 1:
            mark += next(iter(self.components))
        elif len(self.components) == 2:
            mark = "-" + next(iter(frozenset(COMPONENTS) - self.components))
        return "@".join(
            [str(self.recipe), *([mark] if mark else []), *([self.passes] if self.passes != "both" else [])]
        )

    @property
    def component(self) -> str:
        """ "scale", "deadzone", "grid" where exactly one is let through (or imitated); else ""."""
        return next(iter(self.components)) if len(self.components) == 1 else ""

    @property
    def without(self) -> str:
        """The component that is left out; "" where it isn't exactly one."""
        return next(iter(frozenset(COMPONENTS) - self.components)) if len(self.components) == 2 else ""

    def operands(self) -> Operands:
        """The quantizers of a layer under this treatment."""
        recipe = dataclasses.replace(self.recipe, pack_saved=False)
        if self.passes == "forward":
            recipe = dataclasses.replace(recipe, backward="master", quantize_grad=False)
        plain = Operands.of(recipe)
        whole = self.components == frozenset(COMPONENTS) and not self.control

        def taken_apart(quantizer: Quantizer | None) -> Quantizer | None:
            if quantizer is None or whole or isinstance(quantizer, Injected):
                return quantizer
            return Injected(quantizer, self.components, self.control)

        return dataclasses.replace(
            plain,
            weight=taken_apart(plain.weight),
            activation=taken_apart(plain.activation),
            forward=self.passes != "backward",
        )


def treatments(recipes: Sequence[str] = ("mxfp4",), *, of: str = "mxfp4") -> tuple[Treatment, ...]:
    """The usual set: every recipe, then each component of `of` alone, left out, and replaced by noise, each once."""
    texts = [*recipes, *(f"{of}@{mark}{name}" for mark in ("", "-", "~") for name in COMPONENTS)]
    return tuple(dict.fromkeys(map(Treatment.parse, texts)))


@contextlib.contextmanager
def treated(model: nn.Module, treatment: Treatment | str, *, seed: int = 0) -> Iterator[None]:
    """While the block runs, every converted layer of `model` computes under `treatment`; afterwards as before.

    seed: of the control's noise. torch's global generators are as before afterwards, too; inside they are seeded.
    Raises RolloutError for a model without converted layers, or inside rollout_weights (enter that one inside).
    """
    treatment = Treatment.parse(treatment)
    layers = list(quantized_layers(model))
    if not layers:
        raise RolloutError(f"treated: {type(model).__name__} has no converted layer; call mxrl.convert(model, 'bf16')")
    if any(layer.holds for layer in layers):
        raise RolloutError("treated: the model is inside rollout_weights; leave that block first")
    operands = treatment.operands()
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    forget_activations()
    try:
        for layer in layers:
            layer.use(operands)
        with torch.random.fork_rng(devices=gpus):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in gpus)):
                generator.manual_seed(seed)
            yield
    finally:
        for layer in layers:  # which remember what they had
            layer.use(layer.operands)
        forget_activations()
