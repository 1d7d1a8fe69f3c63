"""What did a study find, on one page that can be handed on?

``report(store, out)`` writes ``index.html``, which needs no network and no script to be read, and
its tables as CSV, Parquet, Markdown and LaTeX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.cautions import cautions
from geomstats_lm.cube import list_leaves, settings_of, write_leaf
from geomstats_lm.declaration import StudyConfig, key_of
from geomstats_lm.findings import Findings, ModelFindings, find
from geomstats_lm.main_table import (
    display_table,
    layer_groups,
    main_table,
    print_table,
    table_markdown,
    table_notes,
)
from geomstats_lm.merging import correlate
from geomstats_lm.table_files import Table, write_tables
from geomstats_lm.top_tokens import (
    TextUnavailable,
    in_context,
    largest,
    measured,
    text_source,
    tokenizer_of,
)

__all__ = [
    "correlate",
    "display_table",
    "layer_groups",
    "main_table",
    "print_table",
    "report",
    "table_markdown",
    "table_notes",
    "write_report_files",
]

METHOD_PAPER = "arXiv:2604.02459"


def report(
    store: str | Path,
    out: str | Path,
    *,
    models: Sequence[str] | None = None,
    corpus: pd.DataFrame | str | Path | Sequence[str | Path] | None = None,
    tokenizers: Mapping[str, Any] | None = None,
    title: str = "Tokenwise decomposition of layer updates",
    method: str = "spearman",
    norm: str = "raw",
    n_boot: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Write a study's report: one self-contained HTML page, and its tables in four formats.

    Parameters
    ----------
    store : str or Path
        Zarr store of the study.  What a model lacks is left out, and the page says so.
    out : str or Path
        Folder for ``index.html`` and ``tables/``.
    models : sequence of str, optional
        Model keys; all by default.
    corpus : pandas.DataFrame, path or sequence of paths, optional
        The text that was read, to show tokens in their context; by default they are decoded with
        the tokenizer that the study names, if it is on this machine.
    tokenizers : mapping, optional
        Model key to tokenizer (or its folder), in place of those that the study names.
    title : str
        Of the page.
    method : {"spearman", "kendall", "pearson", "biweight"}
        Correlation of size and damage.
    norm : {"raw", "relative", "standardized"}
        Which size of the residual.
    n_boot : int
        Resamples of whole documents, at least 100.
    level : float
        Coverage of all intervals.
    seed : int
        Of the resamples: equal stores and seeds give equal pages.
    progress : bool
        Show a progress bar.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    FileNotFoundError
        If there is no study at ``store``.
    ValueError
        If the study is empty, ``out`` is a file, a model is not in the study, or an option is not
        among what is accepted; before anything is computed.

    Examples
    --------
    >>> import tempfile
    >>> from geomstats_lm import decompose, geometry
    >>> from geomstats_lm.cube import write_leaf
    >>> from geomstats_lm.datasets import example_node
    >>> store = tempfile.mkdtemp() + "/study.zarr"
    >>> measured = geometry(example_node())
    >>> _ = write_leaf(measured, store, "gpt2", "geometry", settings={}, progress=False)
    >>> report(store, store + "-report", n_boot=100, progress=False).name
    'index.html'
    """
    keys = _check(store, out, models, method, norm, n_boot, level)
    if corpus is not None and not isinstance(corpus, pd.DataFrame):
        from geomstats_lm.corpus import read_corpus

        corpus = read_corpus(corpus)
    findings = find(
        store, keys, level=level, n_boot=n_boot, seed=seed, method=method, norm=norm,
        progress=progress,
    )  # fmt: skip
    return write_page(findings, Path(out), corpus=corpus, tokenizers=tokenizers, title=title)


def _check(
    store: str | Path,
    out: str | Path,
    models: Sequence[str] | None,
    method: str,
    norm: str,
    n_boot: int,
    level: float,
) -> list[str]:
    """The models' keys, or what is wrong, before anything is read or written."""
    paths = list_leaves(store)
    known = [k for k in dict.fromkeys(p.split("/")[0] for p in paths) if k != "statistics"]
    if not known:
        raise ValueError(f"store={str(store)!r}: there is no model in this study")
    if isinstance(models, str):
        models = [models]
    unknown = [key for key in models or [] if key not in known]
    if unknown or (models is not None and not models):
        raise ValueError(f"models={list(models or [])}: accepted are {known}")
    for parent in (Path(out), *Path(out).parents):
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"out={str(out)!r}: {parent} is a file, not a folder")
    for name, given, accepted in (
        ("method", method, ("spearman", "kendall", "pearson", "biweight")),
        ("norm", norm, ("raw", "relative", "standardized")),
    ):
        if given not in accepted:
            raise ValueError(f"{name}={given!r}: accepted are {', '.join(accepted)}")
    if n_boot < 100 or not 0 < level < 1:
        raise ValueError(
            f"n_boot={n_boot}, level={level}: accepted are n_boot >= 100 and 0 < level < 1"
        )
    return list(models) if models is not None else known


def write_page(
    findings: Findings,
    out: Path,
    *,
    corpus: pd.DataFrame | None = None,
    tokenizers: Mapping[str, Any] | None = None,
    title: str = "Tokenwise decomposition of layer updates",
) -> Path:
    """Write ``index.html`` and ``tables/`` of what was found.

    Parameters
    ----------
    findings : Findings
        From :func:`geomstats_lm.findings.find`.
    out : Path
        Folder.
    corpus, tokenizers, title
        As for :func:`report`.

    Returns
    -------
    Path
        The page.
    """
    from geomstats_lm.report_page import render
    from geomstats_lm.report_sections import sections
    from geomstats_lm.token_strips import STYLE

    made = sections(findings)
    settings = _settings(findings)
    tokens, strips, notes = _tokens(findings, corpus, tokenizers)
    tables = [settings, *(table for section in made for table in section.tables)]
    if tokens is not None:
        tables.append(tokens)
    names = ", ".join(model.attrs.get("model_name", model.key) for model in findings.models)
    cite, bibtex = _citation(findings)
    page = render(
        {
            "title": title, "lead": f"Models: {names}. Intervals have {findings.level:.0%} "
            f"coverage, from {findings.n_boot} resamples of whole documents.",
            "settings": settings, "sections": made, "strips": strips, "token_notes": notes,
            "tokens_table": tokens, "cautions": cautions(findings), "cite": cite,
            "bibtex": bibtex, "strip_style": STYLE,
        }
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_tables(tables, out / "tables")
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def write_report_files(
    config: StudyConfig, *, corpus: pd.DataFrame | None = None, progress: bool = True
) -> pd.DataFrame:
    """Write a study's ``table.csv``, ``table.md``, ``correlations.csv``, ``figures/``, ``report/``.

    Parameters
    ----------
    config : StudyConfig
        A study whose leaves are all finished.
    corpus : pandas.DataFrame, optional
        The text that was read, for the report's tokens.
    progress : bool
        Show a progress bar.

    Returns
    -------
    pandas.DataFrame
        The main table, unrounded.
    """
    from geomstats_lm.plots import study_figures

    keys = [key_of(model) for model in config.models]
    findings = find(config.store, keys, **config.correlate.model_dump(), progress=progress)
    table, per_layer = findings.together("table"), findings.together("correlation")
    assert table is not None and per_layer is not None  # all leaves are there
    output = Path(config.output)
    table.to_csv(output / "table.csv", index=False)
    per_layer.to_csv(output / "correlations.csv", index=False)
    write_leaf(
        xr.Dataset.from_dataframe(per_layer.rename_axis("row")), config.store, "statistics",
        "rank_correlation", settings=config.correlate.model_dump(), overwrite=True, progress=False,
    )  # fmt: skip
    (output / "table.md").write_text(table_markdown(table), encoding="utf-8")
    figures = output / "figures"
    figures.mkdir(exist_ok=True)
    geometries = [m.leaves["geometry"] for m in findings.models]
    damages = [m.leaves["perturbation"] for m in findings.models]
    for name, figure in study_figures(geometries, damages, per_layer).items():
        figure.savefig(figures / f"{name}.png", dpi=150, bbox_inches="tight")
    write_page(findings, output / "report", corpus=corpus)
    return table


def _settings(findings: Findings) -> Table:
    """What was run: a row a fact, a column a model."""
    columns: dict[str, dict[str, str]] = {m.key: _facts(m) for m in findings.models}
    facts = dict.fromkeys(fact for column in columns.values() for fact in column)
    frame = pd.DataFrame(
        [{"fact": fact, **{k: c.get(fact, "–") for k, c in columns.items()}} for fact in facts]
    )
    return Table("settings", "What was run", frame, display=frame.rename(columns={"fact": ""}))


def _facts(model: ModelFindings) -> dict[str, str]:
    attrs = model.attrs
    facts = {
        "model": attrs.get("model_name", model.key),
        "source": attrs.get("model_source"),
        "revision": attrs.get("revision"),
        "architecture": attrs.get("architecture"),
        "parameters": _thousands(attrs.get("n_parameters")),
        "blocks": attrs.get("n_layers"),
        "dims": attrs.get("dim"),
        "vocabulary": _thousands(attrs.get("vocabulary")),
        "type of weights": attrs.get("model_dtype"),
        "parameter checksum (SHA-256)": _short(attrs.get("parameter_checksum")),
        "tokenizer": attrs.get("tokenizer"),
        "text checksum (SHA-256)": _short(attrs.get("text_checksum")),
        "windows": attrs.get("n_windows"),
        "tokens a window": attrs.get("window_length"),
        "documents": attrs.get("n_documents"),
        "seed of the split": attrs.get("split_seed"),
        "software": attrs.get("software"),
        "leaves": ", ".join([*model.leaves, *(f"{n} (not finished)" for n in model.incomplete)]),
    }
    geometry, damage = model.leaves.get("geometry"), model.leaves.get("perturbation")
    if geometry is not None:
        made = settings_of(geometry).get("decomposition", {})
        facts |= {
            "function classes": ", ".join(str(v) for v in geometry.function_class.values),
            "neighbours k": made.get("k", attrs.get("k")),
            "ridge": attrs.get("ridge"),
            "target, metric": ", ".join(
                str(made[n]) for n in ("target", "metric") if n in made
            ) or None,
            "no neighbours from the same": made.get("exclude"),
        }  # fmt: skip
        if "n_reference" in geometry:
            facts["reference tokens"] = _thousands(int(geometry["n_reference"].max()))
    if damage is not None:
        made = settings_of(damage)
        facts |= {
            "positions": ", ".join(str(v) for v in damage.positions.values),
            "single positions a window": made.get("n_single"),
            "controls": ", ".join(made.get("controls", [])) or None,
            "seed of the perturbation": made.get("seed"),
        }
        if "kl_floor" in damage:
            facts["KL when nothing is changed"] = f"{float(damage['kl_floor'].max()):.1e} nats"
    if model.correlation is not None:
        chosen = model.correlation.settings
        facts["correlation"] = ", ".join(
            str(chosen[n]) for n in ("method", "norm", "interval") if n in chosen
        )
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _thousands(value: Any) -> str | None:
    return None if value is None else f"{int(value):,}"


def _short(checksum: str | None) -> str | None:
    return f"{checksum[:16]}…" if checksum else None


def _tokens(
    findings: Findings, corpus: pd.DataFrame | None, tokenizers: Mapping[str, Any] | None
) -> tuple[Table | None, list[dict[str, Any]], list[str]]:
    """The table of tokens, their strips, and what could not be shown."""
    frames, groups, notes = [], [], []
    for model in findings.models:
        found = largest(model)
        if not len(found):
            notes.append(f"{model.key}: neither residuals nor damage were measured.")
            continue
        texts: Any = None
        try:
            texts = text_source(model, corpus, tokenizer_of(tokenizers, model.key))
        except TextUnavailable as reason:
            notes.append(f"{model.key}: the tokens' text is not available: {reason}.")
        words = []
        for kind, leaf, values in measured(model):
            rows = found[found["of"] == kind]
            if texts is not None and len(rows):
                group, own = _strips(model, kind, leaf, values, rows, texts)
                groups.append(group)
                words += own
        frames.append(found.assign(text=words) if words else found)
    if not frames:
        return None, groups, notes
    frame = pd.concat(frames, ignore_index=True).drop(columns="index")
    headings = {
        "model": "model", "of": "largest", "rank": "rank", "value": "value", "text": "token",
        "document": "document", "position": "position", "token_id": "token id",
        "char_start": "from character", "char_end": "to",
    }  # fmt: skip
    caption = "Tokens with the largest residual and the largest damage"
    return Table("tokens", caption, frame, headings), groups, notes


def _strips(
    model: ModelFindings, kind: str, leaf: xr.Dataset, values: np.ndarray, rows: pd.DataFrame,
    texts: Any,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    import markupsafe

    from geomstats_lm.token_strips import strip_legend, token_strip

    label, units = ("relative error", "") if kind == "residual" else ("KL", "nats")
    finite = values[np.isfinite(values)]
    limits = (0.0, float(np.quantile(finite, 0.99)))  # one token alone must not set the scale
    strips, words = [], []
    for row in rows.to_dict("records"):
        near = in_context(leaf, row["index"])
        pieces = texts(leaf, near)
        focus = int(np.flatnonzero(near == row["index"])[0])
        words.append(pieces[focus])
        html = token_strip(
            pieces, values[near], label=label, units=units, kind=kind, limits=limits, focus=focus,
            legend=False, style=False,
        )  # fmt: skip
        where = f"{label} {row['value']:.3g}{' ' + units if units else ''}, " + ", ".join(
            f"{name} {row[name]}" for name in ("document", "position") if name in row
        )
        strips.append({"caption": where, "html": markupsafe.Markup(html)})
    title = f"{model.key}, {model.main_class}: largest {kind}"
    legend = markupsafe.Markup(strip_legend(label, units, kind, limits))
    return {"title": title, "legend": legend, "strips": strips}, words


def _citation(findings: Findings) -> tuple[str, str]:
    from geomstats_lm import __version__

    sums = sorted({str(m.attrs["parameter_checksum"])[:12] for m in findings.models
                   if m.attrs.get("parameter_checksum")})  # fmt: skip
    text = (
        f"Made with geomstats_lm {__version__}. Please name the version, the models with their "
        f"parameter checksums ({', '.join(sums) or 'not recorded'}) and the text. The "
        f"decomposition and its perturbation follow {METHOD_PAPER}."
    )
    bibtex = (
        "@software{geomstats_lm,\n  author = {{The geomstats_lm authors}},\n"
        "  title = {geomstats_lm: statistics for language-model internals},\n"
        f"  version = {{{__version__}}}\n}}"
    )
    return text, bibtex
