"""A recipe is one complete, frozen description of how a model is quantized (no torch).

Grammar, parsed by `Recipe.parse` and printed by `str`:

    BASE [+mbs[:MODE]] [+of[:ALPHA]] [+aqn[:START:END]] [+w4a16 | +w4a8] [+KEY=VALUE]...

    BASE   bf16 | mxfp4 | mxfp4:floor | mxfp4:even | mxfp4:ideal | mxfp4:e8m{1..8} | nvfp4 | nvfp4:4over6 | mxfp8
    MODE   align (default) | search16 | search256 | joint
    ALPHA  in [0, 1], default 0.5

    "mxfp4+mbs:search16+of:0.5+aqn"    weights and activations in MXFP4 with every correction
    "nvfp4+w4a16"                      weights only
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, fields
from typing import Any

from mxrl.formats import FORMATS, MACRO, MXFP4, BlockFormat

RULES = {
    "bf16": (),
    "mxfp4": ("ceil", "floor", "even", "ideal", *(f"e8m{k}" for k in range(1, 9))),
    "nvfp4": ("", "4over6"),
    "mxfp8": ("ceil",),
}
MBS_MODES = ("align", "search16", "search256", "joint")
ACTIVATIONS = ("a4", "a8", "a16")
DEFAULT_ALPHA = 0.5
DEFAULT_SIGMA = (1e-2, 1e-3)
MACRO_LIMIT = 1 << 20  # longer than any row of a model: kernels hold a macro-block


class RecipeError(ValueError):
    """A recipe that can't be: the message names the part and lists what is possible."""


def _pick(value: str, options: tuple[str, ...], what: str, text: str) -> str:
    if value in options:
        return value
    near = difflib.get_close_matches(value, options, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    possible = ", ".join(o for o in options if o)
    raise RecipeError(f"recipe '{text}': unknown {what} '{value}'{hint}; possible: {possible}")


@dataclass(frozen=True)
class Recipe:
    """How weights and activations are quantized, and what corrects the error (arXiv 2605.20402, 2603.08713).

    The first fields are the grammar's words; the rest have no word and print as `+key=value` when not default.
    """

    base: str = "mxfp4"
    rule: str = "ceil"
    mbs: str | None = None
    of: float | None = None
    aqn: tuple[float, float] | None = None
    activations: str = "a4"
    macro: int = MACRO
    backward: str = "quantized"  # or "master": dY·W and dYᵀ·X
    quantize_grad: bool = False  # dY in the base format too, along each GEMM's own contraction axis
    pack_saved: bool = False  # quantized activations kept for backward as codes and scales; same numbers, fewer bytes
    aqn_placement: str = "before"  # noise before quantization, or "after"
    aqn_target: str = "weight"  # or "norm": QeRL's placement on the RMSNorm weights (arXiv 2510.11696)
    aqn_relative: bool = True  # σ relative to the RMS of the weight matrix, or absolute
    skip: tuple[str, ...] = ()  # fnmatch patterns of module names left unquantized

    def __post_init__(self) -> None:
        self._check_types()
        text = self.base
        _pick(self.base, tuple(RULES), "base", text)
        if self.base != "bf16":
            _pick(self.rule, RULES[self.base], f"scale rule of {self.base}", f"{self.base}:{self.rule}")
        if self.mbs is not None:
            _pick(self.mbs, MBS_MODES, "mbs mode", f"+mbs:{self.mbs}")
        _pick(self.activations, ACTIVATIONS, "activations", f"activations={self.activations}")
        _pick(self.backward, ("quantized", "master"), "backward", f"backward={self.backward}")
        _pick(self.aqn_placement, ("before", "after"), "aqn_placement", f"aqn_placement={self.aqn_placement}")
        _pick(self.aqn_target, ("weight", "norm"), "aqn_target", f"aqn_target={self.aqn_target}")
        if self.base != "mxfp4" and (self.mbs is not None or self.of is not None):
            part = "mbs" if self.mbs is not None else "of"
            raise RecipeError(f"recipe '{self.base}+{part}': {part} corrects mxfp4 bases only; use mxfp4+{part}")
        if self.base == "bf16" and (self.activations != "a4" or self.quantize_grad or self.pack_saved):
            raise RecipeError(
                "recipe 'bf16': nothing is quantized, so w4a16, w4a8, quantize_grad and pack_saved have no meaning"
            )
        if self.pack_saved:
            self._check_pack_saved()
        if self.mbs == "joint" and self.rule != "ceil":
            raise RecipeError(f"recipe 'mxfp4:{self.rule}+mbs:joint': joint is for the ceil rule; use mxfp4+mbs:joint")
        if self.of is not None and not 0 <= self.of <= 1:
            raise RecipeError(f"recipe: of:{self.of:g} is outside [0, 1]")
        if self.aqn is not None and not all(0 <= s < float("inf") for s in self.aqn):
            raise RecipeError(f"recipe: aqn's σ must be finite and not negative, got {self.aqn[0]:g}:{self.aqn[1]:g}")
        if self.aqn is not None and (self.aqn[0] == 0) != (self.aqn[1] == 0):
            raise RecipeError("recipe: aqn anneals geometrically, so σ_start and σ_end are both zero or both positive")
        if self.macro not in range(MXFP4.block, MACRO_LIMIT + 1, MXFP4.block):
            raise RecipeError(
                f"recipe: macro={self.macro} must be a multiple of {MXFP4.block} from {MXFP4.block} to {MACRO_LIMIT}"
            )
        for pattern in self.skip:
            if not pattern or re.search(r"[+,\s]", pattern):
                raise RecipeError(f"recipe: skip pattern '{pattern}' is empty or holds a '+', ',' or space")

    def _check_types(self) -> None:
        """Of what is not one of a few words."""
        numbers = self.aqn or (0.0, 0.0)
        right = {
            "macro": (isinstance(self.macro, int), "a whole number"),
            "of": (isinstance(self.of, int | float | None), "a number or None"),
            "aqn": (isinstance(numbers, tuple) and list(map(_is_number, numbers)) == [True] * 2, "two numbers or None"),
            "skip": (isinstance(self.skip, tuple) and all(isinstance(p, str) for p in self.skip), "a tuple of texts"),
            "quantize_grad": (isinstance(self.quantize_grad, bool), "True or False"),
            "pack_saved": (isinstance(self.pack_saved, bool), "True or False"),
            "aqn_relative": (isinstance(self.aqn_relative, bool), "True or False"),
        }
        for name, (is_right, words) in right.items():
            if not is_right:
                raise RecipeError(f"recipe: {name}={getattr(self, name)!r} must be {words}")

    def _check_pack_saved(self) -> None:
        """The backward pass must need the quantized activation, and that must have a packed form."""
        if self.activations == "a16":
            raise RecipeError("recipe: pack_saved packs quantized activations, and w4a16 leaves them in 16 bits")
        if self.backward == "master" or self.quantize_grad:
            part = "backward=master" if self.backward == "master" else "quantize_grad=True"
            raise RecipeError(f"recipe: pack_saved packs quantized activations, and {part} saves the unquantized ones")
        if self.activations == "a4" and self.rule == "ideal":
            raise RecipeError("recipe 'mxfp4:ideal': its unrounded scale has no packed form; leave out pack_saved=True")

    @property
    def format(self) -> BlockFormat | None:
        """The block format of the 4-bit (or mxfp8) operands; None for bf16."""
        return FORMATS.get(self.base)

    @property
    def quantizes(self) -> bool:
        return self.base != "bf16"

    @property
    def bits(self) -> float:
        """Bits a stored weight element takes, scales included (bf16: 16)."""
        if self.format is None:
            return 16.0
        bits = self.format.bits + (8 / self.macro if self.mbs else 0)
        if self.rule.startswith("e8m"):
            bits += int(self.rule[3:]) / self.format.block
        return bits * (2 if self.of else 1)

    @property
    def operand(self) -> Recipe:
        """The same 4-bit operand quantizer with everything else at its default (noise, roles, backward)."""
        return Recipe(self.base, self.rule, self.mbs, self.of, macro=self.macro)

    @property
    def plain(self) -> Recipe:
        """The base format and scale rule without corrections."""
        return Recipe(self.base, self.rule)

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """Parse the grammar above; raises RecipeError (a ValueError) naming the part that is wrong."""
        if not isinstance(text, str | Recipe):
            raise RecipeError(f"recipe: {text!r} is no text; write for example 'mxfp4+mbs+of'")
        return text if isinstance(text, Recipe) else _parse(text)

    def __str__(self) -> str:
        out = self.base
        if self.base != "bf16" and self.rule != RULES[self.base][0]:
            out += f":{self.rule}"
        if self.mbs is not None:
            out += "+mbs" + (f":{self.mbs}" if self.mbs != "align" else "")
        if self.of is not None:
            out += "+of" + (f":{self.of!r}" if self.of != DEFAULT_ALPHA else "")
        if self.aqn is not None:
            sigmas = "".join(f":{s!r}".replace("e+", "e") for s in self.aqn)  # a + would begin another part
            out += "+aqn" + (sigmas if self.aqn != DEFAULT_SIGMA else "")
        if self.activations != "a4":
            out += "+w4" + self.activations
        for f in fields(self):
            if f.name in _KEYS and getattr(self, f.name) != f.default:
                value = getattr(self, f.name)
                out += f"+{f.name}={','.join(value) if isinstance(value, tuple) else value}"
        return out


_KEYS = ("macro", "backward", "quantize_grad", "pack_saved", "aqn_placement", "aqn_target", "aqn_relative", "skip")
_PARTS = ("mbs", "of", "aqn", "w4a4", "w4a8", "w4a16")


@functools.lru_cache(maxsize=256)  # layers, operators and users give the same few texts at every call
def _parse(text: str) -> Recipe:
    head, *parts = text.strip().split("+")
    base, _, rule = head.partition(":")
    _pick(base, tuple(RULES), "base", text)
    if ":" in head:
        if base == "mxfp4" and rule == "e8m0":
            rule = "ceil"
        _pick(rule, tuple(r for r in RULES[base] if r), f"scale rule of {base}", text)
    elif RULES[base]:
        rule = RULES[base][0]
    values: dict[str, Any] = {"base": base, "rule": rule or RULES[base][0] if RULES[base] else "ceil"}
    seen: set[str] = set()
    for part in parts:
        word, values_of = _parse_part(part, text)
        if word in seen:
            raise RecipeError(f"recipe '{text}': '{word}' is given twice")
        seen.add(word)
        values.update(values_of)
    try:
        return Recipe(**values)
    except RecipeError as err:
        message = str(err)
        raise RecipeError(f"recipe '{text}': {message.split(': ', 1)[-1]}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _number(value: str, what: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise RecipeError(f"recipe '{text}': {what} takes a number, got '{value}'") from None


def _parse_part(part: str, text: str) -> tuple[str, dict[str, Any]]:
    """One `+part` -> (the word that may stand only once, the fields it sets)."""
    if "=" in part:
        key, _, value = part.partition("=")
        _pick(key, _KEYS, "key", text)
        return key, {key: _parse_value(key, value, text)}
    word, *args = part.split(":")
    _pick(word, _PARTS, "part", text)
    if word == "mbs" and len(args) <= 1:
        return word, {"mbs": _pick(args[0], MBS_MODES, "mbs mode", text) if args else "align"}
    if word == "of" and len(args) <= 1:
        return word, {"of": _number(args[0], "of", text) if args else DEFAULT_ALPHA}
    if word == "aqn" and len(args) in (0, 2):
        start, end = (_number(a, "aqn", text) for a in args) if args else DEFAULT_SIGMA
        return word, {"aqn": (start, end)}
    if word.startswith("w4a") and not args:
        return "w4a4, w4a8 or w4a16", {"activations": word[2:]}
    forms = {"mbs": "+mbs or +mbs:MODE", "of": "+of or +of:ALPHA", "aqn": "+aqn or +aqn:START:END"}
    raise RecipeError(f"recipe '{text}': '{part}' can't be read; write {forms.get(word, '+' + word)}")


def _parse_value(key: str, value: str, text: str) -> Any:
    if key == "macro":
        if not re.fullmatch(r"\d+", value):
            raise RecipeError(f"recipe '{text}': macro takes a whole number, got '{value}'")
        return int(value)
    if key in ("quantize_grad", "pack_saved", "aqn_relative"):
        return _pick(value, ("True", "False"), f"value of {key}", text) == "True"
    if key == "skip":
        return tuple(value.split(","))
    return value
