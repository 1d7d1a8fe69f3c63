"""Does the size of what a tokenwise map misses go with the damage done by leaving it out?

    rho(y, x | z) in every cell of `by`,   rho_b the same on clusters drawn with replacement

Tokens of a document are not independent, so documents are drawn, not tokens; ranks are taken anew
in every resample; all cells of a model see the same resamples, so that cells can be pooled and
compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.association import PAIRWISE
from geomstats_lm.statistics.cells import (
    DEFAULT_BY,
    LEAVE_OUT,
    USUAL_BY,
    Cell,
    Selection,
    clusters_by_population,
    coordinates_along,
    read_cells,
    select,
)
from geomstats_lm.statistics.estimates import cluster_sums, estimate_levels, estimate_tokens
from geomstats_lm.statistics.formula import parse_association
from geomstats_lm.statistics.inference import warn_of_few
from geomstats_lm.statistics.multiplicity import check_method
from geomstats_lm.statistics.pooling import RankCorrelation, arrange, as_replicates
from geomstats_lm.statistics.resampling import INTERVALS, draw_counts

UNITS = ("token", "layer", "function_class")
Row = tuple[dict[str, Any], np.ndarray, str]  # columns, replicates, population


def rank_correlation(
    data: xr.Dataset | pd.DataFrame,
    formula: str = "kl ~ residual_norm",
    *,
    by: Sequence[str] = DEFAULT_BY,
    cluster: str | None = "document",
    method: str = "spearman",
    unit: str = "token",
    norm: str = "raw",
    partial: str = "partial",
    n_boot: int = 2000,
    interval: str = "percentile",
    level: float = 0.95,
    adjust: str | None = "fdr_bh",
    adjust_over: Sequence[str] | None = None,
    leave_out: Sequence[str] = LEAVE_OUT,
    nested_in: Sequence[str] = ("model",),
    seed: int = 0,
    workers: int | None = None,
) -> RankCorrelation:
    """Correlation in every cell of `by`, with cluster-bootstrap intervals and adjusted p-values.

    Parameters
    ----------
    data
        Labelled measurements: a Dataset (lazy ones are read one layer at a time) or a tidy frame.
        NaN marks an observation that has no value; pairs are masked jointly before ranking.
    formula
        "response ~ predictor", or "response ~ predictor | z1 + z2" to hold the z fixed.
    by
        Dims, coordinates or columns whose levels each get a row. Of the default's names, those
        that the data lack are passed over; any other unknown name is an error. Dims not named are
        pooled.
    cluster
        What is resampled: observations with equal labels stay together. None treats every
        observation as independent, which for tokens they are not.
    method
        "spearman", "kendall" (tau-b), "pearson" or "biweight" (midcorrelation).
    unit
        "token": over the observations of a cell. "layer", "function_class": over the means of
        that dim's levels, a different claim; documents are resampled under the means, the levels
        stay.
    norm
        Which size of the residual `residual_norm` stands for: "raw" itself, "relative"
        (`relative_error`), "standardized" (`residual_norm_standardized`).
    partial
        "partial" takes the controls out of both sides, "semipartial" out of the predictor alone.
    n_boot
        Resamples; 0 gives estimates alone.
    interval
        "percentile", "bca", "basic", "bootstrap-t" or "robust" (analytic, draws nothing).
    level
        Coverage of the interval.
    adjust, adjust_over
        Multiple testing: a method of statsmodels' `multipletests` or None, and the by-columns
        that make up one family (None: all rows).
    leave_out
        Boolean flags whose tokens do not enter, and "first_position" (position 0 of a window).
        Those the data do not carry are passed over. Counted in `n_left_out`.
    nested_in
        Dims within which cluster labels are distinct: document 3 of one model is not document 3 of
        another. () shares clusters, and resamples, between models.
    seed
        Fixes all resamples.
    workers
        Threads over cells; by default one per CPU this process may use.

    Returns
    -------
    RankCorrelation
        `tidy()` has one row per cell; `replicates` every row's value in every resample; `pool()`
        averages cells.

    Raises
    ------
    TypeError, ValueError
        An argument is not one of the above; a name is not in the data (the nearest ones are given).

    Notes
    -----
    Partial rank correlations are correlations of the residuals of ranks on ranks. `p_value` tests
    rho = 0 with the bootstrap's standard error and G - 1 degrees of freedom.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> size = rng.normal(size=(2, 600))
    >>> data = xr.Dataset(
    ...     {"residual_norm": (("layer", "token"), size), "kl": (("layer", "token"), size**3)},
    ...     coords={"layer": [1, 2], "document": ("token", np.repeat(np.arange(20), 30))},
    ... )
    >>> result = rank_correlation(data, "kl ~ residual_norm", n_boot=200)
    >>> result.tidy()[["layer", "estimate", "n", "n_clusters"]]
       layer  estimate    n  n_clusters
    0      1       1.0  600          20
    1      2       1.0  600          20
    """
    _check(method, unit, partial, n_boot, interval, level)
    check_method(adjust)
    association = parse_association(formula, norm=norm)
    chosen = (by,) if isinstance(by, str) else tuple(by)
    if unit != "token":
        default = chosen in USUAL_BY
        if unit in chosen and not default:
            raise ValueError(
                f"by={chosen} fixes {unit!r}, which unit={unit!r} is to correlate over"
            )
        known = set(data.variables) | set(data.dims) if isinstance(data, xr.Dataset) else set(data)
        chosen = tuple(
            name for name in chosen if name != unit and not (default and name not in known)
        )
    selection = select(
        data,
        association,
        by=chosen if unit == "token" else (*chosen, unit),
        cluster=cluster,
        leave_out=leave_out,
        nested_in=nested_in,
    )
    populations = clusters_by_population(data, selection)
    drawn = 0 if interval == "robust" else n_boot
    counts = {
        label: draw_counts(len(labels), drawn, seed=seed, label=label)
        for label, labels in populations.items()
    }
    settings = {
        "formula": str(association),
        "method": method,
        "unit": unit,
        "norm": norm,
        "cluster": cluster,
        "interval": interval,
        "level": level,
        "n_boot": drawn,
        "adjust": adjust,
        "seed": seed,
    }
    arguments = {
        "method": method,
        "semipartial": partial == "semipartial",
        "interval": interval,
        "level": level,
    }
    columns = tuple(name for name in selection.by if name != unit)
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        if unit == "token":
            done = _token_rows(data, selection, populations, counts, pool, arguments)
        else:
            done = _level_rows(data, selection, unit, populations, counts, pool, arguments)
    if not done:
        raise ValueError("data: no observations in any cell")
    done = _in_order(done, columns)
    table = arrange(
        [{**row, "method": method, "unit": unit} for row, _, _ in done],
        columns,
        coordinates_along(data, columns),
        adjust,
        adjust_over,
    )
    warn_of_few(table["n_clusters"])
    return RankCorrelation(
        title=f"{method.capitalize()} correlation of {association} over {unit}s",
        estimates=table,
        fits=_glance(table, settings),
        settings=settings,
        observations=lambda: _observations(data, selection),
        notes=_notes(table, settings),
        by=columns,
        replicates=as_replicates([replicates for _, replicates, _ in done], table, columns),
        populations=tuple(population for _, _, population in done),
    )


def _check(method: str, unit: str, partial: str, n_boot: int, interval: str, level: float) -> None:
    for name, value, accepted in (
        ("method", method, tuple(PAIRWISE)),
        ("unit", unit, UNITS),
        ("partial", partial, ("partial", "semipartial")),
        ("interval", interval, INTERVALS),
    ):
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(accepted)}")
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} is not between 0 and 1")
    if int(n_boot) != n_boot or n_boot < 0:
        raise ValueError(f"n_boot={n_boot!r} is not a number of resamples (0 or more)")


def _token_rows(
    data: xr.Dataset | pd.DataFrame,
    selection: Selection,
    populations: dict[str, pd.Index],
    counts: dict[str, np.ndarray],
    pool: ThreadPoolExecutor,
    arguments: dict[str, Any],
) -> list[Row]:
    def one(cell: Cell) -> Row:
        codes = populations[cell.population].get_indexer(cell.cluster)
        row, replicates = estimate_tokens(cell.columns, codes, counts[cell.population], **arguments)
        left = {"n_left_out": cell.n_left_out, "n_missing": cell.n_missing}
        return {**cell.key, **row, **left}, replicates, cell.population

    return [row for cells in read_cells(data, selection) for row in pool.map(one, cells)]


def _level_rows(
    data: xr.Dataset | pd.DataFrame,
    selection: Selection,
    unit: str,
    populations: dict[str, pd.Index],
    counts: dict[str, np.ndarray],
    pool: ThreadPoolExecutor,
    arguments: dict[str, Any],
) -> list[Row]:
    """Cells that differ in the unit alone, reduced to sums per cluster, make one row."""
    tables: dict[tuple, dict[str, Any]] = {}
    for cells in read_cells(data, selection):
        for cell in cells:
            key = {name: value for name, value in cell.key.items() if name != unit}
            codes = populations[cell.population].get_indexer(cell.cluster)
            table = tables.setdefault(
                tuple(key.values()),
                {"key": key, "population": cell.population, "sums": [], "left": 0, "missing": 0},
            )
            table["sums"].append(
                cluster_sums(cell.columns, codes, len(populations[cell.population]))
            )
            table["left"] += cell.n_left_out
            table["missing"] += cell.n_missing

    def one(table: dict[str, Any]) -> Row:
        population = table["population"]
        row, replicates = estimate_levels(np.stack(table["sums"]), counts[population], **arguments)
        left = {"n_left_out": table["left"], "n_missing": table["missing"]}
        return {**table["key"], **row, **left}, replicates, population

    return list(pool.map(one, tables.values()))


def _in_order(done: list[Row], by: Sequence[str]) -> list[Row]:
    """Rows sorted by the first appearance of each by-label, however the layers were read."""
    seen: dict[str, dict] = {name: {} for name in by}
    for row, _, _ in done:
        for name in by:
            seen[name].setdefault(row[name], len(seen[name]))
    return sorted(done, key=lambda item: [seen[name][item[0][name]] for name in by])


def _glance(table: pd.DataFrame, settings: dict[str, Any]) -> pd.DataFrame:
    counted = {
        "n_rows": len(table),
        "n": int(table["n"].sum()),
        "min_clusters": int(table["n_clusters"].min()),
        "n_undefined": int(table["estimate"].isna().sum()),
        "n_left_out": int(table["n_left_out"].sum()),
        "n_missing": int(table["n_missing"].sum()),
    }
    return pd.DataFrame([{**settings, **counted}])


def _notes(table: pd.DataFrame, settings: dict[str, Any]) -> list[str]:
    left = int(table["n_left_out"].sum())
    notes = [
        f"{100 * settings['level']:g} % {settings['interval']} intervals, {settings['n_boot']} "
        f"resamples of {settings['cluster'] or 'single observation'}s; "
        f"p-values adjusted by {settings['adjust']}."
    ]
    if left:
        notes.append(
            f"{left} flagged observations (special, massive or first tokens) were left out."
        )
    return notes


def _observations(data: xr.Dataset | pd.DataFrame, selection: Selection) -> pd.DataFrame:
    """One row per observation that entered: values and their ranks within the cell."""
    frames = []
    association = selection.association
    for cells in read_cells(data, selection):
        for cell in cells:
            frame = pd.DataFrame(
                {
                    **{name: [value] * len(cell.columns) for name, value in cell.key.items()},
                    selection.cluster or "observation": cell.cluster,
                    association.response: cell.columns[:, 0],
                    association.predictor: cell.columns[:, 1],
                }
            )
            frame["rank_response"] = frame[association.response].rank()
            frame["rank_predictor"] = frame[association.predictor].rank()
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)
