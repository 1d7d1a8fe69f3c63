"""Is what was observed distinct from what the method gives by itself?

    effect = mean(observed) - mean(null)   or   mean(observed) / mean(null)
    distinct: the interval leaves out no effect;   equivalent: it lies within the margin

Failing to differ is not being the same. Both are tested on the same resamples of documents:
superiority against no effect, equivalence by two one-sided tests against the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from geomstats_lm.statistics.cells import (
    DEFAULT_BY,
    LEAVE_OUT,
    Cell,
    clusters_by_population,
    coordinates_along,
    read_cells,
    select,
)
from geomstats_lm.statistics.estimates import cluster_sums
from geomstats_lm.statistics.formula import Association, check_known
from geomstats_lm.statistics.inference import infer, warn_of_few
from geomstats_lm.statistics.multiplicity import adjust_p_values, check_method
from geomstats_lm.statistics.pooling import arrange, as_replicates
from geomstats_lm.statistics.resampling import draw_counts, jackknife_counts
from geomstats_lm.statistics.results import Result
from geomstats_lm.statistics.rows import available_cpus

EFFECTS = ("difference", "ratio")
KINDS = ("percentile", "bca", "basic")


def test_distinct(
    data: xr.Dataset | pd.DataFrame,
    observed: str,
    null: str | float,
    *,
    effect: str = "difference",
    margin: float | None = None,
    by: Sequence[str] = DEFAULT_BY,
    cluster: str | None = "document",
    n_boot: int = 2000,
    interval: str = "percentile",
    level: float = 0.95,
    adjust: str | None = "fdr_bh",
    adjust_over: Sequence[str] | None = None,
    leave_out: Sequence[str] = LEAVE_OUT,
    nested_in: Sequence[str] = ("model",),
    seed: int = 0,
) -> Result:
    """Superiority and equivalence of an observed quantity against its null, cell by cell.

    Parameters
    ----------
    data
        Frame or Dataset with the observed values and their null, one pair per observation. A null
        with dims that the observed has not (draws, controls) is averaged over them.
    observed, null
        Names of the two variables; the null may be a number (m/d, say).
    effect
        "difference" of means, or "ratio" of means (as `damage_ratio` is one).
    margin
        Effects smaller than this count as none: |difference| < margin, or 1/margin < ratio < margin
        (then margin > 1). None tests superiority alone.
    by, cluster, n_boot, interval, level, adjust, adjust_over, leave_out, nested_in, seed
        As in `rank_correlation`; interval "percentile", "bca" or "basic".

    Returns
    -------
    Result
        One row per cell: `estimate` is the effect, with `mean_observed` and `mean_null`;
        `p_value` tests no effect (two-sided), `p_equivalent` that the effect is as large as the
        margin (both adjusted); `verdict` is "larger", "smaller", "equivalent" or "undecided" at 1
        - level, by adjusted values.

    Raises
    ------
    ValueError
        Unknown names; a margin that is not one.

    Notes
    -----
    Two one-sided tests: Schuirmann (1987); t with G - 1 degrees of freedom and the bootstrap's
    standard error, on the log scale for ratios.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> frame = pd.DataFrame({"document": np.repeat(np.arange(30), 10), "forced": rng.random(300)})
    >>> frame["cos"] = frame["forced"] + 0.001 * rng.normal(size=300)
    >>> test_distinct(frame, "cos", "forced", margin=0.01, n_boot=200).tidy()["verdict"].tolist()
    ['equivalent']
    """
    _check(effect, margin, interval, level)
    check_method(adjust)
    data, null_name = _with_null(data, observed, null)
    selection = select(
        data,
        Association(observed, null_name, None),
        by=by,
        cluster=cluster,
        leave_out=leave_out,
        nested_in=nested_in,
    )
    populations = clusters_by_population(data, selection)
    counts = {
        label: draw_counts(len(labels), n_boot, seed=seed, label=label)
        for label, labels in populations.items()
    }

    def one(cell: Cell) -> tuple[dict[str, Any], np.ndarray]:
        codes = populations[cell.population].get_indexer(cell.cluster)
        sums = cluster_sums(cell.columns, codes, len(populations[cell.population]))
        row, replicates = _estimate(sums, counts[cell.population], effect, margin, interval, level)
        left = {"n_left_out": cell.n_left_out, "n_missing": cell.n_missing}
        return {**cell.key, **row, "n": len(cell.columns), **left}, replicates

    with ThreadPoolExecutor(available_cpus()) as pool:
        rows = [row for cells in read_cells(data, selection) for row in pool.map(one, cells)]
    if not rows:
        raise ValueError("data: no observations in any cell")
    table = arrange(
        [row for row, _ in rows],
        selection.by,
        coordinates_along(data, selection.by),
        adjust,
        adjust_over,
    )
    table["p_equivalent"] = adjust_p_values(table["p_equivalent"].to_numpy(float), adjust)
    table["verdict"] = _verdicts(table, effect, 1 - level)
    warn_of_few(table["n_clusters"])
    settings = {
        "effect": effect,
        "margin": margin,
        "cluster": cluster,
        "interval": interval,
        "level": level,
        "n_boot": n_boot,
        "adjust": adjust,
        "seed": seed,
    }
    return Result(
        title=f"{observed} against {null} ({effect} of means)",
        estimates=table,
        fits=pd.DataFrame([{**settings, "n_rows": len(table), "n": int(table["n"].sum())}]),
        settings=settings,
        notes=[]
        if margin is None
        else [f"equivalent: the {effect} is within a margin of {margin:g}."],
        replicates=as_replicates([replicates for _, replicates in rows], table, selection.by),
    )


test_distinct.__test__ = False  # type: ignore[attr-defined]  # pytest collects by name


def _check(effect: str, margin: float | None, interval: str, level: float) -> None:
    if effect not in EFFECTS:
        raise ValueError(f"effect={effect!r} is not one of {', '.join(EFFECTS)}")
    if interval not in KINDS:
        raise ValueError(f"interval={interval!r} is not one of {', '.join(KINDS)}")
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} is not between 0 and 1")
    floor = 1.0 if effect == "ratio" else 0.0
    if margin is not None and not margin > floor:
        raise ValueError(f"margin={margin!r} must be larger than {floor:g} for a {effect}")


def _with_null(
    data: xr.Dataset | pd.DataFrame, observed: str, null: str | float
) -> tuple[xr.Dataset | pd.DataFrame, str]:
    """Data in which the null is a variable with no dims beyond those of the observed."""
    if not isinstance(data, xr.Dataset | pd.DataFrame):
        raise TypeError(f"data: expected a Dataset or a DataFrame, got {type(data).__name__}")
    known = data.variables if isinstance(data, xr.Dataset) else data.columns
    names = [observed, null] if isinstance(null, str) else [observed]
    check_known(names, known, "test_distinct")
    name = f"null_of_{observed}"
    if isinstance(data, pd.DataFrame):
        return data.assign(**{name: data[null] if isinstance(null, str) else float(null)}), name
    target = data[observed]
    if not isinstance(null, str):
        return data.assign({name: xr.full_like(target, float(null), dtype=float)}), name
    beyond = [dim for dim in data[null].dims if dim not in target.dims]
    return data.assign({name: data[null].mean(beyond)}), name


def _estimate(
    sums: np.ndarray,
    counts: np.ndarray,
    effect: str,
    margin: float | None,
    interval: str,
    level: float,
) -> tuple[dict[str, Any], np.ndarray]:
    used = np.flatnonzero(sums[:, 0] > 0)

    def evaluate(drawn: np.ndarray) -> np.ndarray:
        size, observed, null = sums.T @ drawn.astype(float)
        if effect == "difference":
            return np.where(size > 0, (observed - null) / np.maximum(size, 1), np.nan)
        # ratios of quantities with a sign have no logarithm
        usable = (observed > 0) & (null > 0)
        return np.where(usable, observed / np.where(usable, null, 1.0), np.nan)

    everything = np.ones((len(sums), 1))
    size, observed, null = sums.sum(axis=0)
    means = {
        "mean_observed": observed / size if size else np.nan,
        "mean_null": null / size if size else np.nan,
        "n_clusters": used.size,
        "p_equivalent": np.nan,
    }
    estimate = float(evaluate(everything)[0])
    replicates = evaluate(counts)
    jackknife = None
    if interval == "bca" and used.size > 1:
        every = np.ones((len(sums), jackknife_counts(used.size).shape[1]))
        every[used] = jackknife_counts(used.size)
        jackknife = evaluate(every)
    empty = "no observations" if not size else "a ratio needs positive means"
    row = infer(
        estimate,
        replicates,
        n_clusters=used.size,
        kind=interval,
        level=level,
        jackknife=jackknife,
        reason="" if np.isfinite(estimate) else empty,
        bounded=False,
        null=1.0 if effect == "ratio" else 0.0,
    )
    if row["converged"]:
        to_scale = np.log if effect == "ratio" else np.asarray
        finite = to_scale(replicates[np.isfinite(replicates)])
        error, centre, df = float(np.std(finite, ddof=1)), float(to_scale(estimate)), used.size - 1
        if error > 1e-15:
            row["statistic"] = centre / error
            row["p_value"] = float(2 * stats.t.sf(abs(centre) / error, df))
            if margin is not None:
                bound = float(to_scale(margin))
                means["p_equivalent"] = float(stats.t.sf((bound - abs(centre)) / error, df))
    return {**row, **means}, replicates


def _verdicts(table: pd.DataFrame, effect: str, alpha: float) -> list[str]:
    null = 1.0 if effect == "ratio" else 0.0
    verdicts = []
    for estimate, p_value, p_equivalent in zip(
        table["estimate"].to_numpy(float),
        table["p_adjusted"].to_numpy(float),
        table["p_equivalent"].to_numpy(float),
    ):
        if p_equivalent <= alpha:
            verdicts.append("equivalent")
        elif p_value <= alpha:
            verdicts.append("larger" if estimate > null else "smaller")
        else:
            verdicts.append("undecided")
    return verdicts
