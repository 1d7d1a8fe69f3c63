"""A report says what was planted, in other words for other data; it stands alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from typer.testing import CliRunner

from geomstats_lm import report
from geomstats_lm.cautions import cautions
from geomstats_lm.cli import app
from geomstats_lm.findings import find
from geomstats_lm.report import write_page
from geomstats_lm.sentences import (
    control_sentence,
    correlation_sentence,
    distinct_sentence,
    share_sentence,
    synthesis_sentence,
)
from geomstats_lm.token_examples import tokens_in_context
from geomstats_lm.tokenwise_share import tokenwise_share
from tests.report_samples import ATTRS, WORDS, findings_of, planted_node, write_study

QUICK = {"n_boot": 100, "progress": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    nodes = {key: planted_node(key, seed=i) for i, key in enumerate(("first", "second"))}
    return write_study(folder / "study.zarr", nodes)


@pytest.fixture(scope="module")
def page(store: Path, tmp_path_factory) -> Path:
    return report(store, tmp_path_factory.mktemp("page") / "out", **QUICK)


def found_in(**planted):
    return findings_of({"planted": planted_node(**planted)})


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (1.0, "tokens with larger residuals do more damage"),
        (-1.0, "tokens with larger residuals do less damage"),
        (0.0, "cannot be told to go together"),
    ],
)
def test_correlation_sentence_follows_the_data(slope: float, words: str) -> None:
    found = found_in(slope=slope)
    sentence = correlation_sentence(found)
    assert words in sentence
    row = (
        found.models[0]
        .pooled_correlation.tidy()
        .query("positions == 'all' and layer_group != 'layer 1'")
    )
    number = f"{row['estimate'].item():.2f} [{row['conf_low'].item():.2f}, "
    assert number in sentence and "20 documents" in sentence


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(2.0, "does more damage than"), (0.5, "does less damage than"), (1.0, "cannot be told from")],
)
def test_control_sentence_follows_the_data(ratio: float, words: str) -> None:
    sentence = control_sentence(found_in(ratio=ratio))
    assert f"{words} another token's residual of the same norm" in sentence
    assert f"({ratio:.2f} [{ratio:.2f}, {ratio:.2f}] times as much" in sentence


@pytest.mark.parametrize(
    ("share", "words"), [(0.8, "explains most of"), (0.2, "explains less than half of")]
)
def test_share_sentence_follows_the_data(share: float, words: str) -> None:
    assert words in share_sentence(found_in(share=share))


def test_sentences_of_a_planted_right_angle_and_of_two_models() -> None:
    found = findings_of({key: planted_node(key, seed=i) for i, key in enumerate("ab")})
    judged = found.models[0].geometry.query("measure == 'angle_residual_tokenwise'")
    number = judged["verdict"].str.startswith("distinct").sum()
    words = "nowhere distinct" if number == 0 else f"distinct in {number} of 3 layers"
    assert words in distinct_sentence(found)
    # the residual turned towards the tokenwise part: now it is distinct everywhere
    node = planted_node()
    angle = node["geometry"]["angle_residual_tokenwise"]
    node["geometry"]["angle_residual_tokenwise"] = angle - 20
    turned = findings_of({"planted": node})
    sentence = distinct_sentence(turned)
    assert "distinct in all 3 layers" in sentence and "still points along the fit" in sentence
    assert "over 2 models" in synthesis_sentence(found)
    assert "needs correlations of two models" in synthesis_sentence(turned)


def test_share_is_what_numpy_says() -> None:
    geometry = planted_node(share=0.3)["geometry"]
    row = tokenwise_share(geometry, groups={"late": [2, 3]}, n_boot=200).tidy().iloc[0]
    one = geometry.isel(model=0, function_class=0)
    shares = [
        1 - np.nansum(one.residual_norm.sel(layer=v).values.astype(float) ** 2)
        / np.nansum(one.update_centred_norm.sel(layer=v).values.astype(float) ** 2)
        for v in (2, 3)
    ]  # fmt: skip
    assert row["estimate"] == pytest.approx(np.mean(shares), rel=1e-6)
    layers = tokenwise_share(geometry, n_boot=0).tidy()["estimate"]
    np.testing.assert_allclose(layers[1:], geometry.r2_centred.values[0, 0, 1:], rtol=1e-6)
    assert row["conf_low"] < row["estimate"] < row["conf_high"] and row["n_clusters"] == 20


def test_tables_are_the_same_in_every_format(page: Path) -> None:
    folder = page.parent / "tables"
    names = {p.stem for p in folder.glob("*.csv")}
    assert names == {
        "settings", "main", "share", "geometry", "correlations", "damage_ratios", "synthesis",
        "tokens",
    }  # fmt: skip
    for name in names:
        frame = pd.read_parquet(folder / f"{name}.parquet")
        again = pd.read_csv(folder / f"{name}.csv", keep_default_na=True)
        assert list(frame) == list(again) and len(frame) == len(again) > 0
        numbers = frame.select_dtypes("number")
        for column in numbers:
            np.testing.assert_allclose(again[column], numbers[column], rtol=1e-12)
        latex = (folder / f"{name}.tex").read_text(encoding="utf-8")
        assert latex.count(r"\toprule") == latex.count(r"\bottomrule") >= 1
        lines = (folder / f"{name}.md").read_text(encoding="utf-8").splitlines()
        assert len([v for v in lines if v.startswith("|")]) == len(frame) + 2
    correlations = pd.read_csv(folder / "correlations.csv")
    assert len(correlations) == 2 * 2 * 3  # models x ways of patching x layers
    assert (pd.read_csv(folder / "damage_ratios.csv")["estimate"].round(9) == 2).all()


class Page(HTMLParser):
    """Ids, places that a browser would fetch, and tags left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.places: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.places.append(value)
        if tag not in ("meta", "link", "br", "img", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}>"


def test_page_stands_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not parsed.open and len(parsed.ids) == len(set(parsed.ids))
    assert all(place.startswith(("#", "data:")) for place in parsed.places)
    targets = {place[1:] for place in parsed.places if place.startswith("#")}
    assert targets <= set(parsed.ids)
    assert "default-src 'none'" in text and "prefers-color-scheme:dark" in text
    assert text.count("<svg") >= 10 and "@import" not in text
    for heading in ("What was run", "Is the residual distinct", "Which tokens?", "How to cite"):
        assert heading in text


def test_equal_findings_give_equal_pages_and_titles_are_escaped(tmp_path) -> None:
    pages = [
        write_page(
            findings_of({"one": {"geometry": planted_node()["geometry"]}}),
            tmp_path / place, title="<script>alert(1)</script>",
        ).read_text(encoding="utf-8")
        for place in "ab"
    ]  # fmt: skip
    assert pages[0] == pages[1]
    assert "<script>alert" not in pages[0] and "&lt;script&gt;alert" in pages[0]


def test_what_is_missing_is_said(tmp_path) -> None:
    node = planted_node()

    def text_of(place: str, leaves: dict[str, xr.Dataset]) -> str:
        page = write_page(findings_of({"one": leaves}), tmp_path / place)
        return page.read_text(encoding="utf-8")

    text = text_of("a", {"geometry": node["geometry"]})
    assert "its perturbation is not in the study; geomstats-lm perturb makes it" in text
    assert "whether residual and damage go together cannot be said" in text.lower()
    assert not (tmp_path / "a" / "tables" / "correlations.csv").exists()
    text = text_of("b", {"perturbation": node["perturbation"]})
    assert "its geometry is not in the study; geomstats-lm geometry makes it" in text
    assert "does more damage than" in text  # the ratio needs no geometry
    part = node["perturbation"].sel(layer=[2], positions=["all"])
    text = text_of("c", {"geometry": node["geometry"], "perturbation": part})
    assert "all positions at once" in text and "one position at a time" not in text


def test_a_store_may_hold_one_model_of_several_and_an_unfinished_leaf(store, tmp_path) -> None:
    import zarr

    copy = tmp_path / "study.zarr"
    shutil.copytree(store, copy)
    ledger = zarr.open_group(copy)["second/perturbation/finished"]
    ledger[...] = 0
    found = find(copy, ["second"], n_boot=100)
    assert found.models[0].incomplete == ["perturbation"]
    assert "perturbation is not finished" in " ".join(cautions(found))
    assert "lacks what it is measured from" in correlation_sentence(found)


def test_one_document_and_rows_without_a_value(tmp_path) -> None:
    node = planted_node(documents=1)
    node["geometry"]["residual_norm"][..., 0, :] = np.nan
    page = write_page(findings_of({"one": node}), tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    assert "with one document there are no intervals" in text
    assert "one evaluation document, so nothing has an interval" in text
    assert not re.search(r"\b(nan|None|NaT)\b", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))


def test_cautions_name_what_was_planted() -> None:
    node = planted_node(documents=6, share=0.05)
    node["geometry"].attrs |= {"untrained": 1, "dequantized": 1, "model_dtype": "bfloat16"}
    node["geometry"]["n_massive"] = node["geometry"]["n_massive"] + 3
    node["perturbation"]["kl"] = node["perturbation"]["kl"] * 1e-9
    other = planted_node("other", documents=60)
    other["geometry"].attrs["text_checksum"] = "ef" * 32
    found = findings_of({"planted": node, "other": other})
    found.models[0].unconverged = ["mlp"]
    said = " ".join(cautions(found))
    for words in (
        "planted: untrained", "dequantized", "bfloat16", "6 evaluation documents", "3 massive",
        "floor of precision", "has an error of 1 or more", "did not read the same text",
        "fits of mlp did not converge",
    ):  # fmt: skip
        assert words in said
    assert "other: 60" not in said and "other: untrained" not in said


def test_tokens_are_shown_in_the_text_that_was_read() -> None:
    node = planted_node()
    index = 5 * 12 + 7  # document 5, position 7
    node["geometry"]["relative_error"][..., index] = 9.0
    found = findings_of({"one": node})
    corpus = pd.DataFrame({"text": [" ".join(WORDS)] * 20})
    corpus.attrs["text_checksum"] = ATTRS["text_checksum"]
    table, groups, notes = tokens_in_context(found, corpus, None)
    assert notes == [] and len(groups) == 2
    tokens = table.frame
    first = tokens[(tokens["of"] == "residual") & (tokens["rank"] == 1)].iloc[0]
    assert first["document"] == 5 and first["position"] == 7 and first["value"] == 9.0
    assert first["text"].strip() == WORDS[7]
    shown = str(groups[0]["strips"][0]["html"])
    assert f'class="focus" style="--a:1.00" title="relative error 9"> {WORDS[7]}</span>' in shown
    # the context is the token's own window: all of its words, none of another document's
    assert re.sub("<[^>]*>", "", shown).split() == WORDS
    corpus.attrs["text_checksum"] = "another"
    table, groups, notes = tokens_in_context(found, corpus, None)
    assert groups == [] and "text" not in table.frame
    assert "the documents given are not those of the study" in notes[0]
    assert "is not on this machine" in notes[0]


def test_tokens_are_decoded_where_the_tokenizer_is_here() -> None:
    from geomstats_lm.datasets import example_path
    from geomstats_lm.models import load_tokenizer

    node = planted_node()
    tokenizer = load_tokenizer(example_path("gpt2"))
    ids = tokenizer("The residual of a naïve café — ever so small.")["input_ids"][:12]
    for leaf in node.values():
        leaf["token_id"] = ("token", np.resize(ids, leaf.sizes["token"]))
    table, groups, notes = tokens_in_context(
        findings_of({"one": node}), None, {"one": example_path("gpt2")}
    )
    assert notes == [] and "text" in table.frame
    shown = re.sub("<[^>]*>", "", str(groups[0]["strips"][0]["html"]))
    assert shown == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"models": ["none"]}, "models=.*accepted are"),
        ({"models": []}, "models="),
        ({"n_boot": 5}, "n_boot=5"),
        ({"level": 1.0}, "level=1.0"),
        ({"method": "tau"}, "method='tau': accepted are spearman"),
        ({"norm": "l1"}, "norm='l1'"),
    ],
)
def test_refuses_before_work(store, tmp_path, options, match) -> None:
    with pytest.raises(ValueError, match=match):
        report(store, tmp_path / "never", **{"progress": False, **options})
    assert not (tmp_path / "never").exists()


def test_refuses_a_store_that_is_none_and_an_out_that_is_a_file(store, tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        report(tmp_path / "nothing.zarr", tmp_path / "never", **QUICK)
    frame = xr.Dataset({"estimate": ("row", [1.0])})
    empty = write_study(tmp_path / "e.zarr", {"statistics": {"some": frame}})
    with pytest.raises(ValueError, match="no model in this study"):
        report(empty, tmp_path / "never", **QUICK)
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ValueError, match="is a file, not a folder"):
            report(store, place, **QUICK)
    assert not (tmp_path / "never").exists()


def test_command(store, tmp_path) -> None:
    runner = CliRunner()
    words = ["report", str(store), "--out", str(tmp_path / "out"), "--n-boot", "100", "-q"]
    result = runner.invoke(app, [*words, "--model", "first"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "out" / "index.html").exists() and "index.html" in result.output
    wrong = runner.invoke(app, [*words, "--model", "none"])
    assert wrong.exit_code != 0 and "accepted are" in str(wrong.exception)


@pytest.mark.slow
def test_latex_compiles(page: Path, tmp_path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex on this machine")
    folder = tmp_path / "tables"
    shutil.copytree(page.parent / "tables", folder)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all_tables.tex"],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert (folder / "all_tables.pdf").stat().st_size > 10_000


WATCH = """<script>
window.seen = [];
addEventListener("error", (e) => seen.push("error " + e.message), true);
addEventListener("securitypolicyviolation", (e) => seen.push("blocked " + e.blockedURI));
addEventListener("load", () => {
  for (const d of document.querySelectorAll("details")) d.open = true;
  const table = [...document.querySelectorAll("table")].find(
    (t) => t.caption.textContent.startsWith("Correlation"));
  const column = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent === "correlation");
  const values = () => [...table.tBodies[0].rows].map((r) => r.cells[column].dataset.value);
  const button = table.tHead.rows[0].cells[column].firstElementChild;
  button.click(); const up = values(); button.click(); const down = values();
  for (const r of performance.getEntriesByType("resource")) seen.push("fetched " + r.name);
  const wide = [...document.querySelectorAll("main, section, p, figure, .figures, .token-strip")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.className);
  const root = document.documentElement;
  parent.postMessage(JSON.stringify(
    {seen, scroll: root.scrollWidth, inner: innerWidth, up, down, wide}), "*");
});
</script>"""


FRAME = """<!doctype html><script>
addEventListener("message", (e) => document.documentElement.setAttribute("data-found", e.data));
</script><iframe src="watched.html" style="border:0;width:{width}px;height:900px"></iframe>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
def test_page_in_a_browser(page: Path, tmp_path, width: int) -> None:
    """No error, no request, no overflow; tables sort.  A page with all three is told apart."""
    chromium = next(
        (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))),
        None,
    )
    if chromium is None:
        pytest.skip("no chromium on this machine")
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{WATCH}", 1)
    good, errors = _in_browser(chromium, text, tmp_path, width)
    assert good["seen"] == [] and not errors
    assert good["inner"] == width and good["scroll"] <= width and good["wide"] == []
    numbers = [float(v) for v in good["up"]]
    assert numbers == sorted(numbers) and [float(v) for v in good["down"]] == numbers[::-1]
    worse = text.replace(
        "<main>",
        '<main><div style="width:3000px">x</div><img src="http://example.invalid/a.png">'
        "<script>console.error('bad')</script>",
        1,
    )
    bad, errors = _in_browser(chromium, worse, tmp_path, width)
    assert bad["scroll"] > width and any("blocked" in v for v in bad["seen"]) and errors


def _in_browser(chromium: str, text: str, folder: Path, width: int):
    import html
    import json

    # in a frame, since a window of the browser is never narrower than 500 pixels
    (folder / "watched.html").write_text(text, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.replace("{width}", str(width)), encoding="utf-8")
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", "--window-size=1500,1000",
            "--virtual-time-budget=5000", "--dump-dom", frame.as_uri(),
        ],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), errors
