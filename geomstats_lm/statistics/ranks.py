"""How strongly do two columns rise together, in every resample of their clusters at once?

    rho_b = cov_w(R_w(x), R_w(y)) / sqrt(var_w(R_w(x)) var_w(R_w(y))),   w_i = times cluster(i)
    was drawn in resample b

R_w are the exact midranks of the resample: a row drawn w times stands there w times, so its
doubled midrank is 2 * (weight strictly below) + (weight of its tie group) + 1. One sort of the
data serves all resamples, and the resamples go through the kernels `LANES` at a time so that the
inner loop is a vector instruction.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# resamples per pass: one row of int32 ranks is then two cache lines (fastest of 8, 16, 32, 64
# measured)
LANES = 32


def resampled_spearman(
    x: np.ndarray, y: np.ndarray, cluster: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Spearman correlation of x and y in each resample of clusters, ranked anew in each.

    Parameters
    ----------
    x, y
        Finite or infinite values without NaN, shape (n,).
    cluster
        Integer code of each row's cluster, 0 <= code < counts.shape[0], shape (n,).
    counts
        How often each cluster was drawn, shape (n_clusters, n_boot). A column of ones is the data
        itself.

    Returns
    -------
    numpy.ndarray
        Correlations, shape (n_boot,); NaN where a resample is constant in x or y.

    Notes
    -----
    The sum of squares of tied midranks is (N^3 - N - sum(t^3 - t)) / 12 over tie groups of weight t
    (Kendall, *Rank Correlation Methods*, 1948, chapter 3).

    Examples
    --------
    >>> x = np.array([1.0, 2.0, 3.0, 4.0])
    >>> resampled_spearman(x, x**2, np.array([0, 0, 1, 1]), np.ones((2, 1), dtype=np.int32))
    array([1.])
    """
    order_x, starts_x = sort_once(x)
    order_y, starts_y = sort_once(y)
    place = np.empty(x.size, np.int32)
    place[order_y] = np.arange(x.size, dtype=np.int32)
    cluster = np.ascontiguousarray(cluster, dtype=np.int32)
    cluster_x, cluster_y, place_x = cluster[order_x], cluster[order_y], place[order_x]
    scratch = np.empty((x.size, LANES), np.int32)
    result = np.empty(counts.shape[1])
    for first in range(0, counts.shape[1], LANES):
        block = lanes(counts, first)
        ties_x, ties_y, cross, total = _spearman_sums(
            starts_x, cluster_x, place_x, starts_y, cluster_y, block, scratch
        )
        covariance = cross / 4 - total * ((total + 1) / 2) ** 2
        variance_x = (total**3 - total - ties_x) / 12
        variance_y = (total**3 - total - ties_y) / 12
        width = min(LANES, counts.shape[1] - first)
        result[first : first + width] = ratio(covariance, variance_x, variance_y)[:width]
    return result


def sort_once(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorting permutation and where each tie group starts (one more entry closes the last)."""
    order = np.argsort(values, kind="stable").astype(np.int32)
    ordered = values[order]
    new = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return order, np.concatenate([[0], new, [values.size]]).astype(np.int32)


def lanes(counts: np.ndarray, first: int) -> np.ndarray:
    """Resamples first .. first + LANES as contiguous int32, padded with empty resamples."""
    block = np.zeros((counts.shape[0], LANES), np.int32)
    piece = counts[:, first : first + LANES]
    block[:, : piece.shape[1]] = piece
    return block


def ratio(covariance: np.ndarray, variance_x: np.ndarray, variance_y: np.ndarray) -> np.ndarray:
    """covariance / sqrt(variance_x variance_y), in [-1, 1]; NaN where a variance is zero."""
    positive = (variance_x > 0) & (variance_y > 0)
    scale = np.sqrt(np.where(positive, variance_x, 1.0)) * np.sqrt(
        np.where(positive, variance_y, 1.0)
    )
    return np.where(positive, np.clip(covariance / scale, -1.0, 1.0), np.nan)


@njit(nogil=True, cache=True, error_model="numpy")
def _spearman_sums(starts_x, cluster_x, place, starts_y, cluster_y, counts, ranks):
    """Doubled x midranks into `ranks` in the order of y, then sum of w * 2R(x) * 2R(y) along y."""
    n_clusters = counts.shape[0]
    below = np.zeros(LANES, np.int32)
    tie = np.zeros(LANES, np.int32)
    ties_x = np.zeros(LANES, np.float64)
    ties_y = np.zeros(LANES, np.float64)
    cross = np.zeros(LANES, np.float64)
    within_tie = np.zeros(LANES, np.float64)
    single_x = np.zeros(n_clusters, np.int64)  # untied rows: their t^3 - t depends on cluster alone
    single_y = np.zeros(n_clusters, np.int64)
    for s in range(starts_x.size - 1):
        first, last = starts_x[s], starts_x[s + 1]
        if last == first + 1:
            row, g = place[first], cluster_x[first]
            for k in range(LANES):
                weight = counts[g, k]
                ranks[row, k] = 2 * below[k] + weight + 1
                below[k] += weight
            single_x[g] += 1
            continue
        for k in range(LANES):
            tie[k] = 0
        for q in range(first, last):
            g = cluster_x[q]
            for k in range(LANES):
                tie[k] += counts[g, k]
        for q in range(first, last):
            row = place[q]
            for k in range(LANES):
                ranks[row, k] = 2 * below[k] + tie[k] + 1
        for k in range(LANES):
            t = np.float64(tie[k])
            ties_x[k] += t * t * t - t
            below[k] += tie[k]
    for k in range(LANES):
        below[k] = 0
    for s in range(starts_y.size - 1):
        first, last = starts_y[s], starts_y[s + 1]
        if last == first + 1:
            g = cluster_y[first]
            for k in range(LANES):
                weight = counts[g, k]
                own = np.float64(2 * below[k] + weight + 1)
                cross[k] += np.float64(weight) * np.float64(ranks[first, k]) * own
                below[k] += weight
            single_y[g] += 1
            continue
        for k in range(LANES):
            tie[k] = 0
            within_tie[k] = 0.0
        for q in range(first, last):
            g = cluster_y[q]
            for k in range(LANES):
                weight = counts[g, k]
                tie[k] += weight
                within_tie[k] += np.float64(weight) * np.float64(ranks[q, k])
        for k in range(LANES):
            t = np.float64(tie[k])
            ties_y[k] += t * t * t - t
            cross[k] += within_tie[k] * np.float64(2 * below[k] + tie[k] + 1)
            below[k] += tie[k]
    for g in range(n_clusters):
        for k in range(LANES):
            weight = np.float64(counts[g, k])
            excess = weight * weight * weight - weight
            ties_x[k] += single_x[g] * excess
            ties_y[k] += single_y[g] * excess
    return ties_x, ties_y, cross, below.astype(np.float64)


def resampled_kendall(
    x: np.ndarray, y: np.ndarray, cluster: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Kendall's tau-b of x and y in each resample of clusters; arguments as `resampled_spearman`.

    Pairs are counted in one sweep along x over a Fenwick tree of y that holds `LANES` resamples in
    every node, O(n log n) per pass. Copies of a row are tied with each other in x and in y.

    Examples
    --------
    >>> x = np.array([1.0, 2.0, 3.0, 4.0])
    >>> y = np.array([1.0, 3.0, 2.0, 4.0])
    >>> resampled_kendall(x, y, np.zeros(4, int), np.ones((1, 1), dtype=np.int32)).round(3)
    array([0.667])
    """
    order_x, starts_x = sort_once(x)
    order_y, starts_y = sort_once(y)
    level_y = np.empty(x.size, np.int32)
    level_y[order_y] = np.repeat(np.arange(starts_y.size - 1), np.diff(starts_y))
    cluster = np.ascontiguousarray(cluster, dtype=np.int32)
    result = np.empty(counts.shape[1])
    for first in range(0, counts.shape[1], LANES):
        score, pairs, tied_x, tied_y = _kendall_sums(
            starts_x,
            cluster[order_x],
            level_y[order_x],
            starts_y,
            cluster[order_y],
            lanes(counts, first),
        )
        width = min(LANES, counts.shape[1] - first)
        result[first : first + width] = ratio(score, pairs - tied_x, pairs - tied_y)[:width]
    return result


@njit(nogil=True, cache=True, error_model="numpy")
def _kendall_sums(starts_x, cluster_x, level, starts_y, cluster_y, counts):
    """Concordant minus discordant weight, all pairs, pairs tied in x, pairs tied in y."""
    n_levels = starts_y.size - 1
    tree = np.zeros((n_levels + 1, LANES), np.int32)
    total = np.zeros(LANES, np.int32)
    score = np.zeros(LANES, np.float64)
    tied_x = np.zeros(LANES, np.float64)
    tied_y = np.zeros(LANES, np.float64)
    balance = np.zeros(LANES, np.int32)
    tie = np.zeros(LANES, np.int32)
    for s in range(starts_x.size - 1):
        first, last = starts_x[s], starts_x[s + 1]
        for q in range(first, last):
            # (weight below y) - (weight above y) = prefix(level) + prefix(level + 1) - total
            for k in range(LANES):
                balance[k] = -total[k]
            node = level[q]
            while node > 0:
                for k in range(LANES):
                    balance[k] += tree[node, k]
                node -= node & -node
            node = level[q] + 1
            while node > 0:
                for k in range(LANES):
                    balance[k] += tree[node, k]
                node -= node & -node
            g = cluster_x[q]
            for k in range(LANES):
                score[k] += np.float64(counts[g, k]) * np.float64(balance[k])
        for k in range(LANES):
            tie[k] = 0
        for q in range(first, last):
            g = cluster_x[q]
            node = level[q] + 1
            while node <= n_levels:
                for k in range(LANES):
                    tree[node, k] += counts[g, k]
                node += node & -node
            for k in range(LANES):
                tie[k] += counts[g, k]
        for k in range(LANES):
            t = np.float64(tie[k])
            tied_x[k] += t * (t - 1.0) / 2.0
            total[k] += tie[k]
    for s in range(n_levels):
        for k in range(LANES):
            tie[k] = 0
        for q in range(starts_y[s], starts_y[s + 1]):
            for k in range(LANES):
                tie[k] += counts[cluster_y[q], k]
        for k in range(LANES):
            t = np.float64(tie[k])
            tied_y[k] += t * (t - 1.0) / 2.0
    everything = total.astype(np.float64)
    return score, everything * (everything - 1.0) / 2.0, tied_x, tied_y


def resampled_pearson(
    x: np.ndarray, y: np.ndarray, cluster: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Pearson correlation in each resample of clusters, from the clusters' sums alone.

    The columns are centred and scaled on the data first, so that the sums do not cancel; a
    resample whose variance is below 1e-12 of the data's is called constant. Arguments as
    `resampled_spearman`.
    """
    if x.size == 0 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return np.full(counts.shape[1], np.nan)
    x, y = _standardized(x), _standardized(y)
    n_clusters = counts.shape[0]
    sums = np.stack(
        [
            np.bincount(cluster, weights=weights, minlength=n_clusters)
            for weights in (np.ones_like(x), x, y, x * x, y * y, x * y)
        ]
    )
    size, sum_x, sum_y, square_x, square_y, cross = sums @ counts
    size = np.maximum(size, 1)
    variance_x, variance_y = square_x - sum_x**2 / size, square_y - sum_y**2 / size
    floor = 1e-12 * size
    return ratio(
        cross - sum_x * sum_y / size,
        np.where(variance_x > floor, variance_x, 0.0),
        np.where(variance_y > floor, variance_y, 0.0),
    )


def _standardized(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max()
    values = values / scale if scale > 0 else values  # squares of 1e200 would overflow
    centred = values - values.mean()
    spread = np.sqrt(np.mean(centred**2))
    # rounding in the mean leaves a spread of a few ulp in a constant column
    return centred / spread if spread > 1e-14 else np.zeros_like(centred)
