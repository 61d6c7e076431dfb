"""The recipe grammar: what it reads, what it prints, and what it says when it can't read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxrl import Recipe, RecipeError
from mxrl.formats import MXFP4, MXFP8, NVFP4

BASES = (
    "bf16", "mxfp4", "mxfp4:floor", "mxfp4:even", "mxfp4:ideal", *(f"mxfp4:e8m{k}" for k in range(1, 9)),
    "nvfp4", "nvfp4:4over6", "mxfp8",
)  # fmt: skip


@pytest.mark.parametrize("base", BASES)
def test_bases_round_trip(base):
    recipe = Recipe.parse(base)
    assert str(recipe) == base and Recipe.parse(str(recipe)) == recipe
    assert recipe.quantizes == (base != "bf16")


def test_fields():
    r = Recipe.parse("mxfp4:e8m3+mbs:search16+of:0.25+aqn:0.02:0.002+w4a8")
    assert (r.base, r.rule, r.mbs, r.of, r.aqn, r.activations) == (
        "mxfp4",
        "e8m3",
        "search16",
        0.25,
        (0.02, 0.002),
        "a8",
    )
    assert (r.macro, r.backward, r.quantize_grad, r.skip) == (128, "quantized", False, ())
    assert Recipe.parse("mxfp4+mbs") == Recipe(mbs="align") == Recipe.parse("mxfp4+mbs:align")
    assert Recipe.parse("mxfp4+of") == Recipe(of=0.5) and Recipe.parse("mxfp4+aqn") == Recipe(aqn=(1e-2, 1e-3))
    assert Recipe.parse("mxfp4+w4a4") == Recipe.parse("mxfp4") == Recipe()
    assert Recipe.parse("mxfp4+of:0").of == 0 and Recipe.parse("mxfp4+of:1").of == 1
    assert Recipe.parse(r) is r


def test_order_of_the_parts_does_not_matter():
    parts = ["mbs:joint", "of:0.5", "aqn", "w4a16", "backward=master"]
    texts = {str(Recipe.parse("+".join(["mxfp4", *p]))) for p in itertools.permutations(parts)}
    assert texts == {"mxfp4+mbs:joint+of+aqn+w4a16+backward=master"}


def test_keys():
    text = "mxfp4+of+macro=64+backward=master+quantize_grad=True+aqn_placement=after+aqn_target=norm+aqn_relative=False"
    r = Recipe.parse(text + "+skip=*.0.*,*gate")
    assert (r.macro, r.backward, r.quantize_grad) == (64, "master", True)
    assert (r.aqn_placement, r.aqn_target, r.aqn_relative, r.skip) == ("after", "norm", False, ("*.0.*", "*gate"))
    assert Recipe.parse(str(r)) == r


def test_pack_saved():
    r = Recipe.parse("mxfp4+mbs+of+pack_saved=True")
    assert r.pack_saved and str(r) == "mxfp4+mbs+of+pack_saved=True" and Recipe.parse(str(r)) == r
    assert not Recipe.parse("mxfp4").pack_saved and not r.operand.pack_saved
    assert Recipe.parse("mxfp4:ideal+w4a8+pack_saved=True").pack_saved  # the activation is MXFP8
    for base in ("nvfp4", "nvfp4:4over6", "mxfp8", "mxfp4:e8m3", "mxfp4:even+of:1"):
        assert Recipe.parse(f"{base}+pack_saved=True").pack_saved


unit = st.floats(0, 1)
positive = st.floats(1e-6, 1e30)  # printed with an exponent, of either sign


@st.composite
def recipes(draw):
    base = draw(st.sampled_from(BASES))
    name, _, rule = base.partition(":")
    fields = dict(base=name, rule=rule or ("" if name == "nvfp4" else "ceil"))
    if name == "mxfp4":
        modes = ["align", "search16", "search256", *(["joint"] if fields["rule"] == "ceil" else [])]
        fields |= dict(mbs=draw(st.none() | st.sampled_from(modes)), of=draw(st.none() | unit))
    if name != "bf16":
        fields |= dict(activations=draw(st.sampled_from(["a4", "a8", "a16"])), quantize_grad=draw(st.booleans()))
    return Recipe(
        **fields,
        aqn=draw(st.none() | st.tuples(positive, positive)),
        macro=draw(st.sampled_from([32, 64, 96, 128, 256])),
        backward=draw(st.sampled_from(["quantized", "master"])),
        aqn_placement=draw(st.sampled_from(["before", "after"])),
        aqn_target=draw(st.sampled_from(["weight", "norm"])),
        aqn_relative=draw(st.booleans()),
        skip=draw(st.sampled_from([(), ("lm_head",), ("*.mlp.*", "model.layers.0.*")])),
    )


@given(recipes())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_recipe_round_trips(recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    assert Recipe.parse(str(recipe.operand)) == recipe.operand
    assert hash(recipe) == hash(Recipe.parse(str(recipe)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mxfp4"),
        ("mxfp5", r"mxfp5.*mxfp4"),
        ("mxpf4", r"did you mean 'mxfp4'"),
        ("mxfp4:ciel", r"did you mean 'ceil'.*floor"),
        ("mxfp4:", r"scale rule"),
        ("mxfp4:e8m9", r"e8m9.*e8m1"),
        ("mxfp4:e8m0x", r"e8m0x"),
        ("nvfp4:ceil", r"4over6"),
        ("bf16:ceil", r"ceil"),
        ("mxfp4+mbs:best", r"best.*align, search16, search256, joint"),
        ("mxfp4+mbx", r"mbx.*did you mean 'mbs'"),
        ("mxfp4+", r"unknown part"),
        ("mxfp4+mbs+mbs:joint", r"'mbs' is given twice"),
        ("mxfp4+of+of:1", r"'of' is given twice"),
        ("mxfp4+w4a8+w4a16", r"twice"),
        ("mxfp4+macro=64+macro=128", r"'macro' is given twice"),
        ("mxfp4+of:1.5", r"1.5.*\[0, 1\]"),
        ("mxfp4+of:nan", r"nan"),
        ("mxfp4+of:x", r"of takes a number, got 'x'"),
        ("mxfp4+aqn:0.1", r"\+aqn:START:END"),
        ("mxfp4+aqn:a:b", r"number"),
        ("mxfp4+aqn:0.1:0", r"zero"),
        ("mxfp4+aqn:inf:1", r"finite"),
        ("mxfp4+aqn:-1:1", r"negative"),
        ("mxfp4+macro=100", r"multiple of 32"),
        ("mxfp4+macro=0", r"multiple of 32"),
        ("mxfp4+macro=x", r"whole number"),
        ("mxfp4+mbs+macro=1000000000000", r"from 32 to 1048576"),
        ("mxfp4+skip=a,,b", r"skip pattern '' is empty"),
        ("mxfp4+backward=both", r"both.*quantized, master"),
        ("mxfp4+quantize_grad=yes", r"yes.*True, False"),
        ("mxfp4+bakward=master", r"did you mean 'backward'"),
        ("mxfp4+w4a5", r"w4a5"),
        ("nvfp4+mbs", r"mbs corrects mxfp4 bases only"),
        ("nvfp4+of", r"of corrects mxfp4 bases only"),
        ("mxfp8+mbs", r"mbs corrects mxfp4"),
        ("mxfp8+of:0.5", r"of corrects mxfp4"),
        ("bf16+mbs", r"mbs corrects mxfp4"),
        ("bf16+of", r"of corrects mxfp4"),
        ("bf16+w4a16", r"nothing is quantized"),
        ("bf16+pack_saved=True", r"nothing is quantized.*pack_saved"),
        ("mxfp4+pack_saved=1", r"1.*True, False"),
        ("mxfp4:ideal+pack_saved=True", r"no packed form; leave out pack_saved"),
        ("mxfp4+w4a16+pack_saved=True", r"w4a16 leaves them in 16 bits"),
        ("mxfp4+backward=master+pack_saved=True", r"backward=master saves the unquantized"),
        ("mxfp4+quantize_grad=True+pack_saved=True", r"quantize_grad=True saves the unquantized"),
        ("mxfp4:floor+mbs:joint", r"joint is for the ceil rule"),
    ],
)
def test_errors_name_the_part_and_what_is_possible(text, says):
    with pytest.raises(RecipeError, match=says) as caught:
        Recipe.parse(text)
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
    assert f"'{text}'" in str(caught.value)


def test_errors_of_the_constructor():
    for fields in (
        dict(base="mxfp5"),
        dict(rule="x"),
        dict(base="nvfp4", rule="", of=0.5),
        dict(macro=33),
        dict(macro="128"),
        dict(of="0.5"),
        dict(aqn=0.1),
        dict(aqn=(1.0,)),
        dict(aqn=("1", "2")),
        dict(quantize_grad="yes"),
        dict(skip="*.down_proj"),
        dict(skip=("a+b",)),
        dict(skip=("a,b",)),
        dict(skip=("a ",)),
        dict(of=-0.1),
    ):
        with pytest.raises(RecipeError):
            Recipe(**fields)


def test_properties():
    assert [Recipe.parse(t).format for t in ("bf16", "mxfp4", "nvfp4", "mxfp8")] == [None, MXFP4, NVFP4, MXFP8]
    full = Recipe.parse("mxfp4:e8m3+mbs:search16+of:0.25+aqn+w4a8+macro=64+backward=master+skip=a")
    assert str(full.operand) == "mxfp4:e8m3+mbs:search16+of:0.25+macro=64"
    assert str(full.plain) == "mxfp4:e8m3"
    bits = {
        "bf16": 16, "mxfp4": 4.25, "mxfp8": 8.25, "nvfp4": 4.5, "mxfp4+mbs": 4.3125, "mxfp4+of": 8.5,
        "mxfp4+of:0": 4.25, "mxfp4:e8m8": 4.5, "mxfp4+mbs+of": 8.625, "mxfp4+mbs+macro=32": 4.5,
    }  # fmt: skip
    assert {t: Recipe.parse(t).bits for t in bits} == bits
