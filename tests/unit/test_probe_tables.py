"""The page of experiments/probes: its tables follow from the committed results, its text's figures from its tables."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "experiments" / "probes"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("probe_tables", HERE / "tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look it up
        spec.loader.exec_module(module)
        yield module


def test_the_page_is_what_tables_makes(tables):
    text = tables.PAGE.read_text(encoding="utf-8")
    assert tables.page(text) == text, "run python experiments/probes/tables.py --write"


def test_figures_of_the_text_stand_in_a_table(tables):
    text = tables.PAGE.read_text(encoding="utf-8")
    shown = {n for line in text.splitlines() if line.startswith("|") for n in re.findall(r"\d+\.\d+", line)}
    shown |= {f"{float(n):.3f}" for n in shown}
    prose = text[text.index("## What agrees") : text.index("## Component")]
    figures = set(re.findall(r"\d+\.\d+", prose)) - {"0.5"}  # of B parameters
    assert figures <= shown and len(figures) > 50


def test_a_missing_marker_is_told(tables):
    with pytest.raises(ValueError, match="<!-- drift -->"):
        tables.between("<!-- drift -->\nno end\n", "drift", "new")


def test_cells(tables):
    row = {"value": -0.11718, "low": -0.2, "high": 0.0004}
    assert tables.interval(row, tables.POINTS) == "−11.7 [−20.0, 0.0]"
    assert tables.interval(None, tables.POINTS) == tables.interval(row | {"value": None}, tables.POINTS) == "—"
    assert tables.fixed(3)(-0.0001) == "0.000"
