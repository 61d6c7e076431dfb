"""The page builder, the charts and the files: structure, escaping, self-containment, all or nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

import pytest
import torch
from tiny_models import tiny_model

from mxrl.checkpoint import open_checkpoint
from mxrl.decompose import ErrorStats
from mxrl.report.bars import bars
from mxrl.report.dots import Dot, dots
from mxrl.report.files import staged, write_atomically
from mxrl.report.lines import histogram, lines
from mxrl.report.page import Page, percent, plain
from mxrl.report.sections import stack
from mxrl.report.summary import DERIVED, summary, tensor_rows, to_json
from mxrl.report.svg import Chart, ticks
from mxrl.scan import Scan, scan

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Balanced(HTMLParser):
    """Raises where a tag is closed that is not the open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return parser


def drawing(chart: Chart) -> ET.Element:
    return ET.fromstring(chart.svg)


# ---- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low,high", [(0, 0.0143), (-3, 7), (0, 1), (0.4, 0.41), (5, 5), (0, 1e9), (math.nan, 1)])
def test_ticks_are_round_and_enclose(low: float, high: float) -> None:
    steps = ticks(low, high)
    assert 2 <= len(steps) <= 13
    if math.isfinite(low):
        assert steps[0] <= low + 1e-12
        assert steps[-1] >= high - 1e-12
    gaps = {round((b - a) / (steps[1] - steps[0]), 6) for a, b in itertools.pairwise(steps)}
    assert gaps == {1.0}


def test_numbers_as_text() -> None:
    assert [plain(v) for v in (0.0143, 1234567.0, 0, math.nan, None)] == ["0.01430", "1.235e+06", "0", "–", "–"]
    assert [percent(v) for v in (0.01429, 0.29, 1.0, -1.85, 0, math.inf)] == [
        "1.43 %", "29.0 %", "100 %", "-185 %", "0 %", "–",
    ]  # fmt: skip


def test_stacked_bars_lie_end_to_end() -> None:
    chart = bars(["a", "b"], {"x": [1.0, 2.0], "y": [3.0, 0.5]}, marks={"floor": [2.0, 2.0]})
    boxes = [r.attrib for r in drawing(chart).iter(f"{SVG}rect")]
    assert [r["class"] for r in boxes] == ["s1", "s2", "s1", "s2"]
    x, width = [float(r["x"]) for r in boxes], [float(r["width"]) for r in boxes]
    assert x[0] == x[2]
    assert x[1] == pytest.approx(x[0] + width[0], abs=0.02)  # two decimals in the file
    assert width[1] == pytest.approx(3 * width[0], abs=0.05)
    marks = [line for line in drawing(chart).iter(f"{SVG}line") if line.attrib["class"] == "mark"]
    assert [float(m.attrib["x1"]) for m in marks] == pytest.approx([x[0] + 2 * width[0]] * 2, abs=0.02)
    assert chart.columns == ["", "x", "y", "sum", "floor"]
    assert chart.rows[0] == ["a", "1.000", "3.000", "4.000", "2.000"]
    titles = [t.text for t in drawing(chart).iter(f"{SVG}title")]
    assert "a · y: 3.000" in titles


def test_bars_refuse_a_negative_part_of_a_stack_but_not_beside_one_another() -> None:
    with pytest.raises(ValueError, match=r"part 'x' of 'a' is -1"):
        bars(["a"], {"x": [-1.0]})
    chart = bars(["a"], {"x": [-1.0], "y": [2.0]}, stacked=False, intervals={"x": [(-2.0, 0.5)]})
    boxes = [r.attrib for r in drawing(chart).iter(f"{SVG}rect")]
    assert float(boxes[0]["x"]) + float(boxes[0]["width"]) == pytest.approx(float(boxes[1]["x"]), abs=0.02)
    assert chart.rows == [["a", "-1.000 [-2.000, 0.5000]", "2.000"]]


def test_lines_leave_a_gap_where_there_is_no_number() -> None:
    mean = [1.0, 2.0, math.nan, 4.0, 5.0]
    chart = lines(range(5), {"a": mean, "b": ([1.0] * 5, [0.5] * 5, [1.5] * 5)}, x_label="step")
    paths = [p.attrib["class"] for p in drawing(chart).iter(f"{SVG}path")]
    assert paths == ["band s1", "band s1", "line s1", "line s1", "band s2", "line s2"]
    assert chart.rows[2] == ["2", "–", "1.000 [0.5000, 1.500]"]
    assert len(list(drawing(chart).iter(f"{SVG}circle"))) == 9


def test_charts_of_nothing_are_still_drawings() -> None:
    for chart in (
        bars([], {"x": []}),
        bars(["a"], {"x": [math.nan]}),
        lines([], {"x": []}),
        lines([1], {"x": [math.nan]}),
        histogram([0, 1], [0.0]),
        dots({}),
        dots({"x": [Dot("a", math.nan, 1.0)]}),
    ):
        assert "nan" not in chart.svg
        assert drawing(chart).tag == f"{SVG}svg"


def test_histogram_shows_shares_and_their_reference() -> None:
    chart = histogram([0, 0.5, 1], [0.25, 0.75], reference={"uniform": [0.5, 0.5]}, x_label="δ")
    heights = [float(r.attrib["height"]) for r in drawing(chart).iter(f"{SVG}rect")]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.05)
    assert chart.columns == ["from", "to", "share", "uniform"]
    assert chart.rows[1] == ["0.5", "1", "75.0 %", "50.0 %"]


def test_dots_carry_their_names() -> None:
    chart = dots({"q": [Dot("a", 1.0, 2.0), Dot("gone", math.nan, 1.0)], "k": [Dot("b", 3.0, 4.0)]}, x_label="x")
    circles = list(drawing(chart).iter(f"{SVG}circle"))
    assert [c.attrib["class"] for c in circles] == ["dot s1", "dot s2"]
    assert float(circles[0].attrib["cx"]) < float(circles[1].attrib["cx"])
    assert float(circles[0].attrib["cy"]) > float(circles[1].attrib["cy"])  # downwards
    assert [t.text for t in drawing(chart).iter(f"{SVG}title")] == [
        "a · q: x 1.000, y 2.000",
        "b · k: x 3.000, y 4.000",
    ]
    assert chart.rows == [["a", "q", "1.000", "2.000"], ["b", "k", "3.000", "4.000"]]


def test_hostile_names_are_text() -> None:
    evil = '<script>alert("x")</script>&'
    page = Page(evil, lead=evil, footer=evil).section(evil).text(evil).note(evil).facts({evil: evil})
    page.table([evil], [[evil]], caption=evil, fold=evil)
    page.bars(evil, [evil], {evil: [1.0]}, marks={evil: [1.0]}).lines(evil, [0, 1], {evil: [0, 1]}, x_label=evil)
    page.histogram(evil, [0, 1], [1.0], reference={evil: [1.0]}, x_label=evil)
    page.dots(evil, {evil: [Dot(evil, 1.0, 1.0)]}, x_label=evil, y_label=evil, explain=evil)
    assert "script" not in parse(page.html()).tags
    assert "<script" not in page.html()


# ---- the page --------------------------------------------------------------------------------------------------------


def test_a_page_has_links_tables_and_the_numbers_of_each_plot() -> None:
    page = Page("T").section("One").lines("c", [0, 1], {"a": [0.0, 1.0]}).section("One").table(["a", "b"], [["x", "1"]])
    html = page.html()
    parse(html)
    assert re.findall(r'<h2 id="([^"]+)"', html) == ["one", "one-2"]
    assert re.findall(r'<a href="#([^"]+)"', html) == ["one", "one-2"]
    assert html.count("<figure>") == html.count("The numbers of this plot") == 1
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        page.table(["a"], [["x", "too many"]])


def test_code_stands_between_backticks() -> None:
    assert "<p>use <code>a&lt;b</code> `</p>" in Page("T").text("use `a<b` `").html()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Scan:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(folder)
    return scan(open_checkpoint(folder), ["mxfp4", "mxfp4+of", "mxfp4:ideal"])


@pytest.fixture(scope="module")
def whole(result: Scan) -> dict:
    origin = {"created": "now", "versions": {"mxrl": "0"}, "commit": None, "device": "cpu", "machine": "m"}
    return summary(result, [{"name": "model.safetensors", "bytes": 1, "sha256": "ab"}], origin)


def test_summary_uses_the_names_of_error_stats(result: Scan, whole: dict) -> None:
    total = result.total("mxfp4")
    entry = whole["total"]["mxfp4"]
    assert {k: entry[k] for k in total.to_dict()} == total.to_dict()
    assert {k: entry[k] for k in DERIVED} == {k: getattr(total, k) for k in DERIVED}
    assert entry["bits"] == 4.25
    assert entry["relative_to_mxfp4"] == 1.0
    assert ErrorStats.from_dict(json.loads(to_json(whole))["total"]["mxfp4+of"]) == result.total("mxfp4+of")
    assert whole["kinds"]["experts.up"]["tensors"] == 8
    assert sum(v["elements"] for v in whole["source"]["stored_types"].values()) == total.numel
    assert sorted(whole["left"]) == ["embedding", "norm", "output head", "router"]


def test_rows_sum_to_the_summary(result: Scan, whole: dict) -> None:
    rows = [json.loads(to_json(row)) for row in tensor_rows(result)]
    assert len(rows) == len(result.tensors) * len(result.columns)
    merged = ErrorStats.zero()
    for row in rows:
        if row["recipe"] == "nvfp4":
            merged = merged + ErrorStats.from_dict(row)
    assert merged == ErrorStats.from_dict(whole["total"]["nvfp4"])


def test_json_holds_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        to_json({"a": math.nan})


def test_scale_error_is_never_drawn_as_a_part(result: Scan) -> None:
    """Stacks hold grid, deadzone and excess, which add up to T / ‖x‖²; or T alone where it is below the floor."""
    stats = [result.total(r) for r in ("mxfp4", "mxfp4+of", "mxfp4:ideal")]
    parts, marks = stack(stats)
    assert list(parts) == ["grid", "deadzone", "excess (scales)", "T, below the floor"]
    for i, s in enumerate(stats):
        assert sum(p[i] for p in parts.values()) == pytest.approx(s.rel_mse, rel=1e-12)  # float64 sums, another order
    assert parts["T, below the floor"] == [0.0, stats[1].rel_mse, 0.0]
    assert marks["floor (ideal scales)"][0] == stats[0].floor / stats[0].sq_norm


# ---- files -----------------------------------------------------------------------------------------------------------


def test_write_atomically_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "deep" / "a.txt", "old")
    assert stat.S_IMODE(path.stat().st_mode) & 0o044  # as readable as any new file
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "a.txt", "old")
    fdopen = os.fdopen

    def full(handle: int, *_: object, **__: object) -> IO[str]:
        fdopen(handle).close()
        return open("/dev/full", "w")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match=rf"^can't write to {path}: No space left on device$"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_staged_shows_nothing_of_a_failed_block(tmp_path: Path, existing: bool, error: type[BaseException]) -> None:
    out = tmp_path / "out"
    if existing:
        out.mkdir()
        (out / "a").write_text("old")
    with pytest.raises(error), staged(out) as folder:
        (folder / "a").write_text("half")
        raise error
    assert [p.name for p in tmp_path.rglob("*")] == (["out", "a"] if existing else [])
    assert not existing or (out / "a").read_text() == "old"


@pytest.mark.parametrize("existing", [False, True])
def test_staged_moves_everything_at_the_end(tmp_path: Path, existing: bool) -> None:
    out = tmp_path / "deep" / "out"
    if existing:
        out.mkdir(parents=True)
        (out / "a").write_text("old")
        (out / "other").write_text("kept")
    with staged(out) as folder:
        (folder / "a").write_text("new")
        (folder / "b").write_text("b")
        assert not (out / "b").exists()
    names = {p.name: p.read_text() for p in out.iterdir()}
    assert names == {"a": "new", "b": "b"} | ({"other": "kept"} if existing else {})
    assert stat.S_IMODE(out.stat().st_mode) & 0o055


@pytest.mark.parametrize("existing", [True, False])
def test_staged_clears_what_a_killed_run_left_and_nothing_that_runs(tmp_path: Path, existing: bool) -> None:
    out = tmp_path / "out[1]"
    if existing:
        out.mkdir()
    home = out if existing else tmp_path
    left, other = home / f".{out.name}.abcd1234.tmp", home / ".other.abcd1234.tmp"
    for folder in (left, other):
        folder.mkdir()
        (folder / "tensors.jsonl").write_text("{}")
    with staged(out) as running:
        assert not left.exists() and other.exists()
        with staged(out) as second:
            assert running.exists() and second != running


def test_staged_names_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(OSError, match=re.escape(f"can't write to {out}")), staged(out):
            pass
