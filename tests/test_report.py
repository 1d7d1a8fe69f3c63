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
from geomstats_lm.sentences import (
    control_sentence,
    correlation_sentence,
    distinct_sentence,
    share_sentence,
    synthesis_sentence,
)
from geomstats_lm.tokenwise_share import tokenwise_share
from tests.report_samples import ATTRS, WORDS, planted_node, write_study

QUICK = {"n_boot": 100, "progress": False}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    nodes = {key: planted_node(key, seed=i) for i, key in enumerate(("first", "second"))}
    return write_study(folder / "study.zarr", nodes)


@pytest.fixture(scope="module")
def page(store: Path, tmp_path_factory) -> Path:
    return report(store, tmp_path_factory.mktemp("page") / "out", **QUICK)


def found_in(tmp_path: Path, **planted):
    store = write_study(tmp_path / "study.zarr", {"planted": planted_node(**planted)})
    return find(store, ["planted"], n_boot=100)


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (1.0, "tokens with larger residuals do more damage"),
        (-1.0, "tokens with larger residuals do less damage"),
        (0.0, "cannot be told to go together"),
    ],
)
def test_correlation_sentence_follows_the_data(tmp_path, slope: float, words: str) -> None:
    found = found_in(tmp_path, slope=slope)
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
def test_control_sentence_follows_the_data(tmp_path, ratio: float, words: str) -> None:
    sentence = control_sentence(found_in(tmp_path, ratio=ratio))
    assert f"{words} another token's residual of the same norm" in sentence
    assert f"({ratio:.2f} [{ratio:.2f}, {ratio:.2f}] times as much" in sentence


@pytest.mark.parametrize(
    ("share", "words"), [(0.8, "explains most of"), (0.2, "explains less than half of")]
)
def test_share_sentence_follows_the_data(tmp_path, share: float, words: str) -> None:
    assert words in share_sentence(found_in(tmp_path, share=share))


def test_sentences_of_a_planted_right_angle_and_of_two_models(store: Path, tmp_path) -> None:
    found = find(store, ["first", "second"], n_boot=100)
    judged = found.models[0].geometry.query("measure == 'angle_residual_tokenwise'")
    number = judged["verdict"].str.startswith("distinct").sum()
    words = "nowhere distinct" if number == 0 else f"distinct in {number} of 3 layers"
    assert words in distinct_sentence(found)
    # the residual turned towards the tokenwise part, its size kept: now it is distinct everywhere
    node = planted_node()
    angle = node["geometry"]["angle_residual_tokenwise"]
    node["geometry"]["angle_residual_tokenwise"] = angle - 20
    turned = find(write_study(tmp_path / "turned.zarr", {"planted": node}), ["planted"], n_boot=100)
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


def test_equal_stores_give_equal_pages_and_another_seed_another(store, page, tmp_path) -> None:
    again = report(store, tmp_path / "a", **QUICK)
    assert again.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    other = report(store, tmp_path / "b", models=["first"], seed=1, **QUICK)
    assert "second" not in other.read_text(encoding="utf-8")


def test_what_is_missing_is_said(tmp_path) -> None:
    node = planted_node()
    whole = write_study(tmp_path / "a.zarr", {"one": {"geometry": node["geometry"]}})
    text = report(whole, tmp_path / "a", **QUICK).read_text(encoding="utf-8")
    assert "its perturbation is not in the study; geomstats-lm perturb makes it" in text
    assert "whether residual and damage go together cannot be said" in text.lower()
    assert not (tmp_path / "a" / "tables" / "correlations.csv").exists()
    part = write_study(tmp_path / "b.zarr", {"one": {"perturbation": node["perturbation"]}})
    text = report(part, tmp_path / "b", **QUICK).read_text(encoding="utf-8")
    assert "its geometry is not in the study; geomstats-lm geometry makes it" in text
    assert "does more damage than" in text  # the ratio needs no geometry
    partial = {
        "geometry": node["geometry"],
        "perturbation": node["perturbation"].sel(layer=[2], positions=["all"]),
    }
    fewer = write_study(tmp_path / "c.zarr", {"one": partial})
    text = report(fewer, tmp_path / "c", **QUICK).read_text(encoding="utf-8")
    assert "all positions at once" in text and "one position at a time" not in text


def test_one_document_and_rows_without_a_value(tmp_path) -> None:
    node = planted_node(documents=1)
    node["geometry"]["residual_norm"][..., 0, :] = np.nan
    store = write_study(tmp_path / "s.zarr", {"one": node})
    text = report(store, tmp_path / "out", **QUICK).read_text(encoding="utf-8")
    assert "with one document there are no intervals" in text
    assert "one evaluation document, so nothing has an interval" in text
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL).lower()


def test_cautions_name_what_was_planted(tmp_path) -> None:
    node = planted_node(documents=6, share=0.05)
    node["geometry"].attrs |= {"untrained": 1, "dequantized": 1, "model_dtype": "bfloat16"}
    node["geometry"]["n_massive"] = node["geometry"]["n_massive"] + 3
    node["perturbation"]["kl"] = node["perturbation"]["kl"] * 1e-9
    other = planted_node("other", documents=60)
    other["geometry"].attrs["text_checksum"] = "ef" * 32
    store = write_study(tmp_path / "s.zarr", {"planted": node, "other": other})
    said = " ".join(cautions(find(store, ["planted", "other"], n_boot=100)))
    for words in (
        "planted: untrained", "dequantized", "bfloat16", "6 evaluation documents", "3 massive",
        "floor of precision", "has an error of 1 or more", "did not read the same text",
    ):  # fmt: skip
        assert words in said
    assert "other: 60" not in said and "other: untrained" not in said


def test_tokens_are_shown_in_the_text_that_was_read(tmp_path) -> None:
    node = planted_node()
    index = 5 * 12 + 7  # document 5, position 7
    node["geometry"]["relative_error"][..., index] = 9.0
    store = write_study(tmp_path / "s.zarr", {"one": node})
    corpus = pd.DataFrame({"text": [" ".join(WORDS)] * 20})
    corpus.attrs["text_checksum"] = ATTRS["text_checksum"]
    page = report(store, tmp_path / "out", corpus=corpus, **QUICK)
    tokens = pd.read_csv(page.parent / "tables" / "tokens.csv")
    first = tokens[(tokens["of"] == "residual") & (tokens["rank"] == 1)].iloc[0]
    assert first["document"] == 5 and first["position"] == 7 and first["value"] == 9.0
    assert first["text"].strip() == WORDS[7]
    text = page.read_text(encoding="utf-8")
    assert f'class="focus" style="--a:1.00" title="relative error 9"> {WORDS[7]}</span>' in text
    corpus.attrs["text_checksum"] = "another"
    other = report(store, tmp_path / "b", corpus=corpus, **QUICK).read_text(encoding="utf-8")
    assert "text is not available: the documents given are not those of the study" in other
    assert "is not on this machine" in other


def test_tokens_are_decoded_where_the_tokenizer_is_here(tmp_path) -> None:
    from geomstats_lm.datasets import example_path

    store = write_study(tmp_path / "s.zarr", {"one": planted_node()})
    page = report(store, tmp_path / "out", tokenizers={"one": example_path("gpt2")}, **QUICK)
    tokens = pd.read_csv(page.parent / "tables" / "tokens.csv", keep_default_na=False)
    assert "text" in tokens and "not available" not in page.read_text(encoding="utf-8")


def test_titles_and_names_are_escaped(store, tmp_path) -> None:
    page = report(store, tmp_path / "out", title="<script>alert(1)</script>", **QUICK)
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


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
  root.setAttribute("data-found", JSON.stringify(
    {seen, scroll: root.scrollWidth, inner: innerWidth, up, down, wide}));
});
</script>"""


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
        '<main><p style="width:3000px">x</p><img src="http://example.invalid/a.png">'
        "<script>console.error('bad')</script>",
        1,
    )
    bad, errors = _in_browser(chromium, worse, tmp_path, width)
    assert bad["scroll"] > width and any("blocked" in v for v in bad["seen"]) and errors


def _in_browser(chromium: str, text: str, folder: Path, width: int):
    import html
    import json

    copy = folder / "watched.html"
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000",
            "--virtual-time-budget=5000", "--dump-dom", copy.as_uri(),
        ],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), errors
