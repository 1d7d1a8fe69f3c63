"""What is the correlation in one cell, and in each of its resamples?

    over tokens   rho_b = rho(y_i, x_i), every token as often as its document was drawn
    over layers   rho_b = rho(mean_b y_l, mean_b x_l),  l = 1..L,  means over the tokens drawn

A cell becomes a function from counts (how often each cluster is drawn) to correlations; the
estimate, the bootstrap and the jackknife are that one function at different counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from geomstats_lm.statistics.association import correlation_of_rows, resampled_correlation
from geomstats_lm.statistics.decomposition import COMPONENTS, resampled_decomposition
from geomstats_lm.statistics.inference import infer
from geomstats_lm.statistics.influence import clustered_std_errors
from geomstats_lm.statistics.resampling import jackknife_counts

# counts (n_clusters, n_boot) -> correlations (n_rows, n_boot)
Evaluate = Callable[[np.ndarray], np.ndarray]
# counts -> correlations and their standard errors, both (n_boot,)
StdErrors = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
Answer = list[tuple[dict[str, Any], np.ndarray]]  # a row and its replicates, for each row of a cell
STUDENTIZED = ("robust", "bootstrap-t")


@dataclass(frozen=True)
class Manner:
    """How correlations are estimated; see `rank_correlation` for the values."""

    method: str
    semipartial: bool = False
    interval: str = "percentile"
    level: float = 0.95


def estimate_tokens(
    columns: np.ndarray,
    cluster: np.ndarray,
    counts: np.ndarray,
    manner: Manner,
    part: np.ndarray | None = None,
) -> Answer:
    """Rows of a cell: one, or total, within and between where `part` decomposes it.

    Parameters
    ----------
    columns
        Response, predictor, controls, shape (n, 2 + n_controls), without NaN.
    cluster, part
        Cluster code and part of each row, shape (n,).
    counts
        Shape (n_clusters, n_boot).
    """
    choice: dict[str, Any] = {"method": manner.method, "semipartial": manner.semipartial}

    def evaluate(drawn: np.ndarray) -> np.ndarray:
        if part is None:
            return resampled_correlation(columns, cluster, drawn, **choice)[None, :]
        return resampled_decomposition(columns, cluster, part, drawn, **choice)

    def std_errors(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return clustered_std_errors(columns, cluster, drawn, **choice)

    n_rows = 1 if part is None else len(COMPONENTS)
    reason = why_undefined(columns, manner.method)
    used = np.unique(cluster)
    rows = _from_counts(evaluate, std_errors, n_rows, used, counts, manner, reason)
    for name, (row, _) in zip(COMPONENTS, rows):
        row["n"] = len(columns)
        if part is not None:
            row["component"] = name
            # what a between-part correlation is over are the parts
            row["n"] = len(np.unique(part)) if name == "between" else len(columns)
    return rows


def cluster_sums(columns: np.ndarray, cluster: np.ndarray, n_clusters: int) -> np.ndarray:
    """Per cluster, the number of observations and the sum of each column: (n_clusters, 1 + k)."""
    ones = np.ones((len(columns), 1))
    return np.stack(
        [
            np.bincount(cluster, weights=column, minlength=n_clusters)
            for column in np.concatenate([ones, columns], axis=1).T
        ],
        axis=1,
    )


def estimate_levels(sums: np.ndarray, counts: np.ndarray, manner: Manner) -> Answer:
    """The same over levels of a unit: sums (n_levels, n_clusters, 1 + k) of `cluster_sums`."""
    sums = sums[sums[:, :, 0].sum(axis=1) > 0]
    used = np.flatnonzero(sums[:, :, 0].sum(axis=0) > 0)

    def means(drawn: np.ndarray) -> np.ndarray:
        drawn_sums = np.einsum("lgk,gb->blk", sums, drawn.astype(float), optimize=True)
        size = drawn_sums[..., :1]
        return np.where(size > 0, drawn_sums[..., 1:] / np.maximum(size, 1), np.nan)

    def evaluate(drawn: np.ndarray) -> np.ndarray:
        return correlation_of_rows(
            means(drawn), method=manner.method, semipartial=manner.semipartial
        )[None, :]

    observed = means(np.ones((sums.shape[1], 1)))[0]
    reason = why_undefined(observed, manner.method)
    rows = _from_counts(evaluate, None, 1, used, counts, manner, reason)
    rows[0][0]["n"] = len(sums)
    return rows


def _from_counts(
    evaluate: Evaluate,
    std_errors: StdErrors | None,
    n_rows: int,
    used: np.ndarray,
    counts: np.ndarray,
    manner: Manner,
    reason: str,
) -> Answer:
    n_clusters, n_boot = counts.shape
    everything = np.ones((n_clusters, 1), np.int16)
    estimates = np.full(n_rows, np.nan)
    replicates = np.full((n_rows, n_boot), np.nan)
    jackknife = None
    z_error, z_errors = None, None
    if not reason:
        estimates = evaluate(everything)[:, 0]
        replicates = evaluate(counts) if n_boot else replicates
        if manner.interval == "bca" and used.size > 1:
            left_out = jackknife_counts(used.size)
            every = np.ones((n_clusters, left_out.shape[1]), np.int16)
            every[used] = left_out
            jackknife = evaluate(every)
        if manner.interval in STUDENTIZED and std_errors is not None and used.size > 1:
            z_error = _on_z_scale(*std_errors(everything))[0]
            if manner.interval == "bootstrap-t":
                z_errors = _on_z_scale(*std_errors(counts))
    rows = []
    for k in range(n_rows):
        missing = "" if np.isfinite(estimates[k]) else "no variation is left to correlate"
        row = infer(
            float(estimates[k]),
            replicates[k],
            n_clusters=used.size,
            kind=manner.interval,
            level=manner.level,
            jackknife=None if jackknife is None else jackknife[k],
            z_std_error=z_error,
            z_std_errors=z_errors,
            reason=reason or missing,
        )
        rows.append(({**row, "n_clusters": used.size}, replicates[k]))
    return rows


def _on_z_scale(correlation: np.ndarray, std_error: np.ndarray) -> np.ndarray:
    slope = 1 - correlation**2  # d r / d arctanh(r)
    return np.where(slope > 1e-12, std_error / np.where(slope > 1e-12, slope, 1.0), np.nan)


def why_undefined(columns: np.ndarray, method: str) -> str:
    """Why a cell has no correlation, or nothing."""
    if len(columns) < 3:
        return f"{len(columns)} complete pairs: at least 3 are needed"
    if np.isnan(columns).any():
        return "infinite values of both signs have no mean"
    if method in ("pearson", "biweight") and not np.isfinite(columns).all():
        return f"infinite values have no {method} correlation"
    for name, column in zip(("response", "predictor"), columns.T):
        if np.all(column == column[0]):
            return f"the {name} is constant"
    return ""
