"""How far could the estimate have fallen, had other clusters been sampled?

    counts_b ~ Multinomial(G; 1/G, ..., 1/G),   theta_b = statistic(every cluster g, counts_bg
    times)

A cluster is drawn whole or not at all. Drawing is separate from computing, so that every cell of a
table can share the same resamples, and differences between cells have intervals too.
"""

from __future__ import annotations

import zlib

import numpy as np
from scipy import stats

INTERVALS = ("percentile", "bca", "basic", "bootstrap-t", "robust")
# two bytes each: more than this is over a gigabyte of counts alone
LARGEST_DRAW = 500_000_000
JACKKNIFE_GROUPS = 500


def draw_counts(
    n_clusters: int,
    n_boot: int,
    *,
    seed: int = 0,
    label: str = "",
    strata: np.ndarray | None = None,
) -> np.ndarray:
    """How often each cluster is drawn in each resample, shape (n_clusters, n_boot), int16.

    Parameters
    ----------
    n_clusters, n_boot
        Number of clusters, and of resamples.
    seed, label
        Together they fix the draw: populations with different labels (models) are drawn
        independently of each other, and of the order in which they are asked for.
    strata
        Integer code of each cluster's stratum, shape (n_clusters,): clusters are drawn within
        strata.

    Raises
    ------
    ValueError
        The counts would not fit in memory.

    Examples
    --------
    >>> draw_counts(5, 3, seed=1).sum(axis=0)
    array([5, 5, 5])
    """
    if n_clusters * n_boot > LARGEST_DRAW:
        raise ValueError(
            f"n_boot={n_boot} resamples of {n_clusters} clusters are too many to hold: name a "
            "coarser cluster=, lower n_boot=, or use interval='robust', which draws nothing"
        )
    rng = np.random.default_rng([seed, zlib.crc32(label.encode())])
    counts = np.zeros((n_clusters, n_boot), np.int16)
    members = (
        [np.arange(n_clusters)]
        if strata is None
        else [np.flatnonzero(strata == level) for level in np.unique(strata)]
    )
    for member in members:
        size = member.size
        # a few resamples at a time: the draws themselves need four times the memory of the counts
        step = max(1, 10_000_000 // max(size, 1))
        for first in range(0, n_boot, step):
            number = min(step, n_boot - first)
            drawn = rng.integers(0, size, size=(number, size))
            drawn += size * np.arange(number)[:, None]
            block = np.bincount(drawn.ravel(), minlength=number * size).reshape(number, size)
            counts[member, first : first + number] = block.T
    return counts


def jackknife_counts(n_clusters: int) -> np.ndarray:
    """Counts that leave out one cluster at a time, or one of at most 500 groups of them."""
    n_groups = min(n_clusters, JACKKNIFE_GROUPS)
    group = np.arange(n_clusters) % n_groups
    return (group[:, None] != np.arange(n_groups)[None, :]).astype(np.int16)


def bootstrap_interval(
    estimate: float,
    replicates: np.ndarray,
    *,
    kind: str = "percentile",
    level: float = 0.95,
    jackknife: np.ndarray | None = None,
    std_error: float | None = None,
    replicate_std_errors: np.ndarray | None = None,
    fisher_z: bool = False,
) -> tuple[float, float, str, str]:
    """Interval for an estimate from its bootstrap replicates.

    Parameters
    ----------
    estimate
        The statistic on the data itself.
    replicates
        The statistic in each resample, shape (n_boot,); NaN (degenerate) ones are left out.
    kind
        "percentile"; "basic"; "bca" (needs `jackknife`, the leave-one-cluster-out values);
        "bootstrap-t" (needs `std_error` and `replicate_std_errors`, on the transformed scale).
    level
        Coverage asked for, in (0, 1).
    fisher_z
        Work on arctanh(estimate) where the kind depends on the scale (basic, bootstrap-t).

    Returns
    -------
    tuple
        Low, high, the kind that was in fact used, and a reason where that is not the one asked
        for or where there is no interval (then both ends are NaN).

    Notes
    -----
    Davison and Hinkley, *Bootstrap Methods and their Application*, 1997, chapter 5; quantiles
    interpolate at (B + 1) alpha as `boot.ci` in R does, on a normal scale.

    Examples
    --------
    >>> low, high, used, reason = bootstrap_interval(0.0, np.linspace(-1, 1, 1999), level=0.9)
    >>> round(low, 3), round(high, 3), used
    (-0.901, 0.901, 'percentile')
    """
    finite = np.sort(replicates[np.isfinite(replicates)])
    if not np.isfinite(estimate):
        return np.nan, np.nan, kind, ""
    if finite.size < 2:
        return np.nan, np.nan, kind, "no usable resamples"
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    forward, backward = (_fisher, np.tanh) if fisher_z else (_same, _same)
    if kind == "percentile":
        low, high = normal_quantiles(finite, tails)
        return low, high, kind, ""
    if kind == "basic":
        low, high = normal_quantiles(forward(finite), tails)
        centre = forward(np.float64(estimate))
        return float(backward(2 * centre - high)), float(backward(2 * centre - low)), kind, ""
    if kind == "bca":
        adjusted, reason = bca_levels(estimate, finite, jackknife, tails)
        if reason:
            low, high = normal_quantiles(finite, tails)
            return low, high, "percentile", f"percentile in place of BCa: {reason}"
        low, high = normal_quantiles(finite, adjusted)
        return low, high, kind, ""
    if kind == "bootstrap-t":
        if std_error is None or replicate_std_errors is None:
            raise ValueError("interval='bootstrap-t' needs standard errors of the replicates")
        return _studentized(
            estimate, replicates, std_error, replicate_std_errors, tails, forward, backward
        )
    raise ValueError(f"interval={kind!r} is not one of {', '.join(INTERVALS)}")


def _fisher(values):
    # |r| = 1 is the edge of the scale, not an error: the last double before 1
    return np.arctanh(np.clip(values, -1 + 1e-15, 1 - 1e-15))


def _same(values):
    return values


def normal_quantiles(ordered: np.ndarray, levels: np.ndarray) -> tuple[float, float]:
    """Quantiles at (B + 1) level, interpolated on the normal scale as R's `boot.ci` does."""
    n_boot = ordered.size
    values = []
    for alpha in levels:
        rank = (n_boot + 1) * alpha
        below = int(np.floor(rank))
        if below < 1:
            values.append(float(ordered[0]))
        elif below >= n_boot:
            values.append(float(ordered[-1]))
        else:
            at = stats.norm.ppf([below / (n_boot + 1), alpha, (below + 1) / (n_boot + 1)])
            share = (at[1] - at[0]) / (at[2] - at[0])
            step = ordered[below] - ordered[below - 1]
            # an infinite pair of neighbours has no step between them
            values.append(float(ordered[below - 1] + (share * step if step > 0 else 0.0)))
    return values[0], values[1]


def bca_levels(
    estimate: float, finite: np.ndarray, jackknife: np.ndarray | None, tails: np.ndarray
) -> tuple[np.ndarray, str]:
    """The levels to which BCa moves the tails, and why it cannot where it cannot.

    z0 = Phi^-1(share of replicates below), a = sum(d^3) / (6 sum(d^2)^1.5) with d the mean of the
    jackknife values minus each (Efron 1987).
    """
    if jackknife is None:
        raise ValueError("interval='bca' needs the leave-one-cluster-out values")
    jackknife = jackknife[np.isfinite(jackknife)]
    deviation = jackknife.mean() - jackknife if jackknife.size else jackknife
    squares = float((deviation**2).sum())
    if jackknife.size < 3 or squares <= 1e-24 * max(1.0, estimate**2):
        return tails, "leaving out one cluster does not move the estimate"
    share = (np.sum(finite < estimate) + 0.5 * np.sum(finite == estimate)) / finite.size
    if not 0 < share < 1:
        return tails, "every resample lies on one side of the estimate"
    acceleration = float((deviation**3).sum()) / (6 * squares**1.5)
    shift = stats.norm.ppf(share)
    moved = shift + stats.norm.ppf(tails)
    denominator = 1 - acceleration * moved
    if np.any(denominator <= 0):
        return tails, "acceleration too large"
    return stats.norm.cdf(shift + moved / denominator), ""


def _studentized(
    estimate, replicates, std_error, replicate_std_errors, tails, forward, backward
) -> tuple[float, float, str, str]:
    usable = np.isfinite(replicates) & np.isfinite(replicate_std_errors)
    usable &= replicate_std_errors > 0
    if usable.sum() < 2 or not np.isfinite(std_error) or std_error <= 0:
        low, high = normal_quantiles(np.sort(replicates[np.isfinite(replicates)]), tails)
        return low, high, "percentile", "percentile in place of bootstrap-t: no standard error"
    centre = forward(np.float64(estimate))
    pivots = (forward(replicates[usable]) - centre) / replicate_std_errors[usable]
    low, high = normal_quantiles(np.sort(pivots), tails)
    return (
        float(backward(centre - high * std_error)),
        float(backward(centre - low * std_error)),
        "bootstrap-t",
        "",
    )
