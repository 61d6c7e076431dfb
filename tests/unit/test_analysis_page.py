"""The page of an analysis: made of its two files alone, rebuilt the same, and it says what must be said."""

from __future__ import annotations

import html as entities
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from mxrl import fake_quantize
from mxrl.checkpoint import open_checkpoint
from mxrl.cli import main
from mxrl.report import folder, sections
from mxrl.report.answers import EXTRA
from mxrl.report.compare import analyze_against, analyze_diff
from mxrl.report.console import print_analysis, recommended
from mxrl.report.folder import ReportError, rebuild
from mxrl.report.summary import summary, tensor_rows
from mxrl.scan import scan

ORIGIN = {"created": "now", "versions": {"mxrl": "0"}, "commit": None, "device": "cpu", "machine": "m"}
VOID = {"meta", "br", "hr"}


class Outline(HTMLParser):
    """Tags, which must be balanced, and the text outside of styles."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


def outline(html: str) -> Outline:
    parsed = Outline()
    parsed.feed(html)
    assert parsed.open == []
    return parsed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(model)
    result = scan(open_checkpoint(model), ["mxfp4", "mxfp4+of", "mxfp4:ideal"], extra=EXTRA, moments=True)
    folder.write(out, summary(result, [{"name": "model.safetensors", "bytes": 1, "sha256": "ab"}], ORIGIN),
                 tensor_rows(result))  # fmt: skip
    return out


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "copy")


def changed(copy: Path, **values: Any) -> str:
    """The page of the folder with other values in its summary."""
    path = copy / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return rebuild(copy).read_text()


def test_it_answers_every_question(written: Path) -> None:
    html = (written / "report.html").read_text()
    page = outline(html)
    headings = [entities.unescape(h) for h in re.findall(r"<h2 id=[^>]*>(.*?)</h2>", html)]
    assert headings == [
        "In short", "The fingerprint", "Is δ uniform?", "How precise must a scale be?", "Recipes side by side",
        "What each correction does", "The worst tensors, and why", "Recommended recipes", "How to read this",
        "Left out", "Where the numbers come from",
    ]  # fmt: skip
    found = json.loads((written / "summary.json").read_text())
    assert {"fingerprint", "delta", "sweep", "compared", "corrections", "worst", "recommendation"} <= set(found)
    for number in (
        f"{found['total']['mxfp4']['rel_mse']:#.4g}",
        f"{found['sweep'][3]['t_over_floor']:#.4g}",
        f"{found['delta']['tv']:#.4g}",
        f"{found['corrections']['mxfp4+mbs']['scale']:.3f}",
        f"{found['recommendation']['rel_mse']:#.4g}",
        found["worst"]["tensors"][0]["name"],
    ):
        assert number in page.text
    assert "not a lower bound on error" in page.text
    assert "usually has a higher MSE than OCP" in page.text and "never clips" in page.text
    assert len(html) < 300_000


def test_it_asks_for_nothing(written: Path) -> None:
    html = (written / "report.html").read_text()
    assert not outline(html).tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"(src|href|action|data|poster)=\"(?!#)|url\(|@import", html)
    assert set(re.findall(r"https?://[^\"\s<]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_every_plot_has_its_table_and_every_dot_its_name(written: Path) -> None:
    html = (written / "report.html").read_text()
    figures = re.findall(r"<figure>.*?</figure><details.*?</details>", html, re.DOTALL)
    assert len(figures) == html.count("<figure>")
    assert len(figures) >= 8
    names = {json.loads(line)["name"] for line in (written / "tensors.jsonl").read_text().splitlines()}
    for figure in figures:
        drawing = ET.fromstring(re.search(r'<svg viewBox="0 0 720.*?</svg>', figure, re.DOTALL)[0])  # type: ignore[index]
        assert figure.count("The numbers of this plot") == 1 and "<tbody><tr>" in figure
        for dot in drawing.iter("{http://www.w3.org/2000/svg}circle"):
            assert dot.find("{http://www.w3.org/2000/svg}title") is not None
    every = next(f for f in figures if "Every tensor" in f)
    assert names == {t.split(" · ")[0] for t in re.findall(r"<circle[^>]*><title>(.*?)</title>", every)}


def test_rebuilt_it_is_the_same_page(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (copy / "report.html").read_bytes()
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert capsys.readouterr().out == f"written: {copy / 'report.html'}\n"
    assert (copy / "report.html").read_bytes() == before
    assert sorted(p.name for p in copy.iterdir()) == ["report.html", "summary.json", "tensors.jsonl"]


def tensors(copy: Path) -> int:
    return json.loads((copy / "summary.json").read_text())["tensors"]


def cut(path: Path) -> None:
    """As a copy that broke off, at the end of a line."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda f: (f / "summary.json").unlink(), "has neither summary.json nor probe.json; give"),
        (lambda f: (f / "tensors.jsonl").unlink(), "has no tensors.jsonl; run `mxrl analyze` again"),
        (lambda f: (f / "summary.json").write_text("{"), "summary.json is not valid JSON"),
        (lambda f: (f / "summary.json").write_bytes(b"\xff\xfe"), "summary.json is not valid JSON"),
        (lambda f: (f / "summary.json").write_text("[1]"), "summary.json is not the summary of an analysis"),
        (lambda f: (f / "summary.json").write_text('{"recipes": ["mxfp4"], "schema": 1}'), "has schema 1"),
        (lambda f: (f / "summary.json").write_text('{"recipes": ["mxfp4"], "schema": 2}'), "are not what mxrl"),
        (lambda f: (f / "tensors.jsonl").write_text('{"recipe": "mxfp4"}\n{"na'), "tensors.jsonl, line 2, is not"),
        (lambda f: (f / "tensors.jsonl").write_text('{"recipe": "mxfp4"}\n' * tensors(f)), "are not what mxrl"),
        (lambda f: cut(f / "tensors.jsonl"), "tensors.jsonl has rows of"),
        (lambda f: (f / "tensors.jsonl").write_text(""), "tensors.jsonl has rows of 0 tensors, summary.json says"),
        (lambda f: (f / "tensors.jsonl").write_bytes(b"\xff"), "tensors.jsonl"),
        (shutil.rmtree, "is no folder"),
    ],
)  # fmt: skip
def test_a_folder_that_no_page_can_be_made_of(
    copy: Path, spoil: Any, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copy / "report.html").read_bytes()
    spoil(copy)
    with pytest.raises(ReportError):
        rebuild(copy)
    assert main(["report", str(copy)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("mxrl: ") and "this is a bug" not in err
    assert part in err and str(copy) in err
    if copy.exists():
        assert (copy / "report.html").read_bytes() == before  # the old page stays


def test_what_changes_the_reading_stands_first(copy: Path) -> None:
    source = json.loads((copy / "summary.json").read_text())["source"]
    source["stored_as"] = {
        "bfloat16": {"tensors": 3, "elements": 9, "bits": 16.0, "quantized": False},
        "Q4_1, groups of 32": {"tensors": 35, "elements": 9, "bits": 5.0, "quantized": True},
    }
    html = changed(
        copy,
        source=source,
        recommendation={"budget": 4.5, "withheld": ["Q4_1, groups of 32"]},
        skipped=[{"name": "bad.weight", "kind": "q", "reason": "1 NaN among its 4 elements"}],
        warnings=["shard 1 of 2"],
    )
    text = outline(html).text
    assert "already quantized, quantized once more" in html.split("</h1>")[0]
    first = text[text.index("In short") : text.index("cos(scale, grid)")]  # before any figure
    assert "already quantized (35 × Q4_1, groups of 32 at 5.000 bits an element)" in first
    assert "35 of the" in first and "--against ORIGINAL" in first
    assert "None: weights are stored as Q4_1, groups of 32 already" in text
    for part in ("bad.weight", "1 NaN", "shard 1 of 2"):
        assert part in text


def test_no_error_is_said_to_be_none(copy: Path) -> None:
    found = json.loads((copy / "summary.json").read_text())
    exact = found["total"]["mxfp4"] | {"sq_error": 0.0, "rel_mse": 0.0}
    text = outline(changed(copy, total=found["total"] | {"mxfp4": exact})).text
    assert "by 0 % of their energy. There is no error to split." in text


def test_the_terminal_says_that_a_source_is_quantized(written: Path) -> None:
    found = json.loads((written / "summary.json").read_text())
    out = io.StringIO()
    print_analysis(found, Console(file=out, width=200))
    assert "Already quantized" not in out.getvalue() and "Least error within 4.5 bits" in out.getvalue()
    found["source"]["stored_as"] = {"Q4_1": {"tensors": 1, "elements": 32, "bits": 5.0, "quantized": True}}
    found["recommendation"] = {"budget": 4.5, "withheld": ["Q4_1"]}
    out = io.StringIO()
    print_analysis(found, Console(file=out, width=200))
    assert out.getvalue().startswith("Already quantized: weights are stored as Q4_1.")
    assert "Least error" not in out.getvalue()


def test_a_sample_says_that_it_is_one(copy: Path) -> None:
    found = json.loads((copy / "summary.json").read_text())
    compared = found["compared"] | {"mxfp8": found["compared"]["mxfp8"] | {"sampled": True}}
    html = changed(copy, sampled=found["sampled"] | {"every": 61, "elements": 1234}, compared=compared)
    text = outline(html).text
    assert f"one row in 61 of each tensor, the first included (a row lies along the contraction axis): 1,234 of "\
        f"{found['elements']:,} elements" in text  # fmt: skip
    assert "mxfp8 *" in text and "*: not asked for with --recipe" in text


def models(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint, the same after a small update, and the same with its up projections quantized by `even`."""
    a, b, q = (tmp_path / n for n in "abq")
    model = tiny_model("qwen3")
    model.save_pretrained(a)
    weights = load_file(a / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for folder_, change in (
        (b, lambda n, w: w + 1e-3 * torch.randn(w.shape, generator=generator) if w.dim() == 2 else w),
        (q, lambda n, w: fake_quantize(w, "mxfp4:even") if "up_proj" in n else w),
    ):
        shutil.copytree(a, folder_)
        save_file({n: change(n, w) for n, w in weights.items()}, folder_ / "model.safetensors", {"format": "pt"})
    return a, b, q


def test_the_page_of_a_checkpoint_against_its_original(tmp_path: Path) -> None:
    a, _, q = models(tmp_path)
    found = analyze_against(q, a, out=tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text()
    text = outline(html).text
    assert "What is stored, against the original" in text and "2 as mxfp4:even" in text
    assert f"{found['total']['stored']['rel_mse']:#.4g}" in text
    assert all(sentence in text for sentence in found["reading"])
    assert found["fingerprint"]["recipe"] == "stored"
    assert found["fingerprint"]["kinds"]["up"]["rel_mse"] == found["kinds"]["up"]["recipes"]["mxfp4:even"]["rel_mse"]
    assert rebuild(tmp_path / "out").read_text() == html


def test_the_page_of_two_checkpoints(tmp_path: Path) -> None:
    a, b, _ = models(tmp_path)
    found = analyze_diff(a, b, ["mxfp4+mbs"], out=tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text()
    text = outline(html).text
    for heading in (
        "The update, as each recipe sees it",
        "Has the fingerprint moved?",
        "The tensors that changed most",
    ):
        assert heading in text
    for recipe in ("mxfp4", "mxfp4+mbs"):
        assert f"{found['total']['recipes'][recipe]['kept']:#.4g}" in text
    assert found["total"]["relative_change"] > 0
    assert "sweep" not in found and "fingerprint" not in found
    assert rebuild(tmp_path / "out").read_text() == html


def test_the_page_of_activations(copy: Path) -> None:
    task = {"name": "chain", "split": "train", "seed": 0, "prompts": 8, "tokens": 1390}
    source = {"path": "policy:dense", "format": "Hugging Face model", "files": [], "stored_types": {}}
    text = outline(changed(copy, analysis="activations", task=task, source=source)).text
    assert "MXFP4 error of the activations of" in text and "1,390 tokens" in text and "changes these inputs" in text


def test_many_tensors_are_thinned_and_the_worst_kept() -> None:
    rows = [{"name": str(i), "rel_mse": float(i * 7919 % 5000)} for i in range(5000)]
    shown = sections.thinned(rows)
    assert 1400 < len(shown) <= 1500
    assert {r["rel_mse"] for r in shown} >= {float(v) for v in range(4250, 5000)}
    assert len({r["name"] for r in shown}) == len(shown)
    assert sections.thinned(rows[:1500]) == rows[:1500]


def test_the_sentence_in_the_terminal() -> None:
    kinds = {"q": {"recipe": "mxfp8"}, "k": {"recipe": "nvfp4"}, "v": {"recipe": "nvfp4"}}
    found = {"budget": 5.0, "rel_mse": 0.0081, "kinds": kinds}
    assert recommended(found) == "Least error within 5 bits an element: mxfp8 for q, nvfp4 for k, v; rel. MSE 0.008100."
    one = recommended(found | {"kinds": {"q": {"recipe": "nvfp4"}}})
    assert one == "Least error within 5 bits an element: nvfp4 for all; rel. MSE 0.008100."
