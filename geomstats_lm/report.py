"""What did a study find, on one page that can be handed on?

``report(store, out)`` writes ``index.html``, which needs no network and no script to be read, and
its tables as CSV, Parquet, Markdown and LaTeX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from geomstats_lm.cautions import cautions
from geomstats_lm.cube import list_leaves, write_leaf
from geomstats_lm.declaration import StudyConfig, key_of
from geomstats_lm.findings import Findings, find
from geomstats_lm.main_table import (
    display_table,
    layer_groups,
    main_table,
    print_table,
    table_markdown,
    table_notes,
)
from geomstats_lm.merging import correlate
from geomstats_lm.report_facts import citation, settings_table
from geomstats_lm.table_files import write_tables
from geomstats_lm.token_examples import tokens_in_context

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
    settings = settings_table(findings)
    tokens, strips, notes = tokens_in_context(findings, corpus, tokenizers)
    tables = [settings, *(table for section in made for table in section.tables)]
    if tokens is not None:
        tables.append(tokens)
    names = ", ".join(model.attrs.get("model_name", model.key) for model in findings.models)
    cite, bibtex = citation(findings)
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
