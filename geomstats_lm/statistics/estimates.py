"""What is the correlation in one cell, and in each of its resamples?

    over tokens   rho_b = rho(y_i, x_i), every token as often as its document was drawn
    over layers   rho_b = rho(mean_b y_l, mean_b x_l),  l = 1..L,  means over the tokens drawn

A cell becomes a function from counts (how often each cluster is drawn) to correlations; the
estimate, the bootstrap and the jackknife are that one function at different counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from geomstats_lm.statistics.association import correlation_of_rows, resampled_correlation
from geomstats_lm.statistics.inference import infer
from geomstats_lm.statistics.resampling import jackknife_counts

Evaluate = Callable[[np.ndarray], np.ndarray]


def estimate_tokens(
    columns: np.ndarray,
    cluster: np.ndarray,
    counts: np.ndarray,
    *,
    method: str,
    semipartial: bool = False,
    interval: str = "percentile",
    level: float = 0.95,
) -> tuple[dict[str, Any], np.ndarray]:
    """Row and replicates of a cell: columns (n, k), cluster codes (n,), counts (clusters, boot)."""
    used = np.unique(cluster)
    reason = _why_undefined(columns, method)

    def evaluate(drawn: np.ndarray) -> np.ndarray:
        return resampled_correlation(
            columns, cluster, drawn, method=method, semipartial=semipartial
        )

    row, replicates = _from_counts(
        None if reason else evaluate, used, counts, interval, level, reason
    )
    return {**row, "n": len(columns)}, replicates


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


def estimate_levels(
    sums: np.ndarray,
    counts: np.ndarray,
    *,
    method: str,
    semipartial: bool = False,
    interval: str = "percentile",
    level: float = 0.95,
) -> tuple[dict[str, Any], np.ndarray]:
    """The same over levels of a unit: sums (n_levels, n_clusters, 1 + k) of `cluster_sums`."""
    sums = sums[sums[:, :, 0].sum(axis=1) > 0]
    used = np.flatnonzero(sums[:, :, 0].sum(axis=0) > 0)

    def means(drawn: np.ndarray) -> np.ndarray:
        drawn_sums = np.einsum("lgk,gb->blk", sums, drawn.astype(float), optimize=True)
        size = drawn_sums[..., :1]
        return np.where(size > 0, drawn_sums[..., 1:] / np.maximum(size, 1), np.nan)

    def evaluate(drawn: np.ndarray) -> np.ndarray:
        return correlation_of_rows(means(drawn), method=method, semipartial=semipartial)

    observed = means(np.ones((sums.shape[1], 1)))[0]
    reason = _why_undefined(observed, method)
    row, replicates = _from_counts(
        None if reason else evaluate, used, counts, interval, level, reason
    )
    return {**row, "n": len(sums)}, replicates


def _from_counts(
    evaluate: Evaluate | None,
    used: np.ndarray,
    counts: np.ndarray,
    interval: str,
    level: float,
    reason: str,
) -> tuple[dict[str, Any], np.ndarray]:
    n_clusters, n_boot = counts.shape
    if evaluate is None:
        replicates = np.full(n_boot, np.nan)
        row = infer(np.nan, replicates, n_clusters=used.size, kind=interval, reason=reason)
        return {**row, "n_clusters": used.size}, replicates
    estimate = float(evaluate(np.ones((n_clusters, 1), np.int16))[0])
    replicates = evaluate(counts) if n_boot else np.empty(0)
    jackknife = None
    if interval == "bca" and used.size > 1:
        left_out = jackknife_counts(used.size)
        every = np.ones((n_clusters, left_out.shape[1]), np.int16)
        every[used] = left_out
        jackknife = evaluate(every)
    row = infer(
        estimate,
        replicates,
        n_clusters=used.size,
        kind=interval,
        level=level,
        jackknife=jackknife,
        reason="" if np.isfinite(estimate) else "no variation is left to correlate",
    )
    return {**row, "n_clusters": used.size}, replicates


def _why_undefined(columns: np.ndarray, method: str) -> str:
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
