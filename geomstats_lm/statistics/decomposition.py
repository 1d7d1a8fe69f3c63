"""Is it the tokens of a sequence that go together, or the sequences?

    S = B + W,   B = sum_s n_s (mean_s a)(mean_s b),   r_between = B_xy / sqrt(B_xx B_yy),
    r_within likewise from W

a, b are the ranks (or values) centred on the whole resample, s runs over sequences. The total
correlation is then sqrt(eta_x eta_y) r_between + sqrt((1 - eta_x)(1 - eta_y)) r_within with eta =
B / S, exactly.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from geomstats_lm.statistics.association import partial_from_matrix
from geomstats_lm.statistics.ranks import LANES, lanes, sort_once

COMPONENTS = ("total", "within", "between")
DECOMPOSABLE = ("spearman", "pearson")


def resampled_decomposition(
    columns: np.ndarray,
    cluster: np.ndarray,
    part: np.ndarray,
    counts: np.ndarray,
    *,
    method: str = "spearman",
    semipartial: bool = False,
) -> np.ndarray:
    """Total, within-part and between-part correlation in each resample of clusters.

    Parameters
    ----------
    columns, cluster, counts, method, semipartial
        As in `geomstats_lm.statistics.association.resampled_correlation`; "spearman" or "pearson".
    part
        Integer code of each row's part (sequence), shape (n,). A part lies in one cluster.

    Returns
    -------
    numpy.ndarray
        Shape (3, n_boot): total, within, between (parts weighted by their size). Ranks are taken
        over the whole resample.

    Raises
    ------
    ValueError
        A part belongs to more than one cluster.

    Notes
    -----
    The between part is the correlation of the parts' *means*; with few tokens a part it carries
    their noise (Snijders and Bosker, *Multilevel Analysis*, 2012, section 3.6).

    Examples
    --------
    >>> x = np.array([0.0, 1.0, 10.0, 11.0, 20.0, 21.0])
    >>> y = np.array([1.0, 0.0, 11.0, 10.0, 21.0, 20.0])
    >>> part = np.array([0, 0, 1, 1, 2, 2])
    >>> one = np.ones((3, 1), dtype=np.int16)
    >>> resampled_decomposition(np.stack([y, x], 1), part, part, one)[:, 0].round(2)
    array([ 0.83, -1.  ,  1.  ])
    """
    _, part = np.unique(part, return_inverse=True)
    order = np.argsort(part, kind="stable")
    columns, cluster, part = columns[order], np.asarray(cluster)[order], part[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(part)) + 1, [part.size]])
    owner = cluster[starts[:-1]].astype(np.int32)
    if np.any(owner[part] != cluster):
        raise ValueError("decompose_by: a part belongs to more than one cluster")
    if method == "pearson":
        total, between = _moment_matrices(columns, owner, starts, counts)
    else:
        total, between = _rank_matrices(columns, owner, starts, counts)
    within = total - between
    return np.stack(
        [_correlation(matrix, total, semipartial) for matrix in (total, within, between)]
    )


def _correlation(matrix: np.ndarray, total: np.ndarray, semipartial: bool) -> np.ndarray:
    """Cross-products (n_boot, k, k) to correlations; no variance beyond rounding gives NaN."""
    variance = np.einsum("bii->bi", matrix)
    whole = np.einsum("bii->bi", total)
    scale = np.sqrt(np.where(variance > 1e-12 * whole, variance, np.nan))
    standardized = matrix / scale[:, :, None] / scale[:, None, :]
    standardized = np.clip(standardized, -1.0, 1.0)
    if matrix.shape[1] == 2:
        return standardized[:, 0, 1]
    index = np.arange(matrix.shape[1])
    standardized[:, index, index] = 1.0
    return partial_from_matrix(standardized, semipartial=semipartial)


def _moment_matrices(columns, owner, starts, counts):
    values = columns - columns.mean(axis=0)
    spread = np.abs(values).max(axis=0)
    values = values / np.where(spread > 0, spread, 1.0)
    size = np.diff(starts)
    sums = np.add.reduceat(values, starts[:-1], axis=0)
    products = np.add.reduceat(values[:, :, None] * values[:, None, :], starts[:-1], axis=0)
    drawn = counts[owner].astype(float)  # (n_parts, n_boot)
    weight = np.maximum(size @ drawn, 1.0)
    mean = np.einsum("pk,pb->bk", sums, drawn) / weight[:, None]
    correction = weight[:, None, None] * mean[:, :, None] * mean[:, None, :]
    total = np.einsum("pkl,pb->bkl", products, drawn, optimize=True) - correction
    by_part = sums[:, :, None] * sums[:, None, :] / size[:, None, None]
    between = np.einsum("pkl,pb->bkl", by_part, drawn, optimize=True) - correction
    return total, between


def _rank_matrices(columns, owner, starts, counts):
    n, width = columns.shape
    n_boot = counts.shape[1]
    cluster = np.repeat(owner, np.diff(starts))
    sorts = [sort_once(column) for column in columns.T]
    ranks = np.empty((width, n, LANES), np.int32)
    total = np.empty((n_boot, width, width))
    between = np.empty((n_boot, width, width))
    for first in range(0, n_boot, LANES):
        block = lanes(counts, first)
        for k, (order, tie_starts) in enumerate(sorts):
            _centred_ranks(order, tie_starts, cluster, block, ranks[k])
        stop = min(first + LANES, n_boot)
        for i in range(width):
            for j in range(i, width):
                all_rows, by_part = _cross(ranks[i], ranks[j], owner, starts, block)
                total[first:stop, i, j] = total[first:stop, j, i] = all_rows[: stop - first]
                between[first:stop, i, j] = between[first:stop, j, i] = by_part[: stop - first]
    return total, between


@njit(nogil=True, cache=True, error_model="numpy")
def _centred_ranks(order, starts, cluster, counts, out):
    """2 * midrank - (N + 1) of every row in every lane."""
    below = np.zeros(LANES, np.int32)
    tie = np.zeros(LANES, np.int32)
    for s in range(starts.size - 1):
        for k in range(LANES):
            tie[k] = 0
        for q in range(starts[s], starts[s + 1]):
            g = cluster[order[q]]
            for k in range(LANES):
                tie[k] += counts[g, k]
        for q in range(starts[s], starts[s + 1]):
            row = order[q]
            for k in range(LANES):
                out[row, k] = 2 * below[k] + tie[k] + 1
        for k in range(LANES):
            below[k] += tie[k]
    for i in range(order.size):
        for k in range(LANES):
            out[i, k] -= below[k] + 1


@njit(nogil=True, cache=True, error_model="numpy")
def _cross(a, b, owner, starts, counts):
    """sum w a b over rows, and sum w (sum_s a)(sum_s b) / n_s over parts."""
    total = np.zeros(LANES, np.float64)
    between = np.zeros(LANES, np.float64)
    product = np.zeros(LANES, np.float64)
    sum_a = np.zeros(LANES, np.float64)
    sum_b = np.zeros(LANES, np.float64)
    for p in range(owner.size):
        for k in range(LANES):
            product[k] = 0.0
            sum_a[k] = 0.0
            sum_b[k] = 0.0
        for i in range(starts[p], starts[p + 1]):
            for k in range(LANES):
                x, y = np.float64(a[i, k]), np.float64(b[i, k])
                product[k] += x * y
                sum_a[k] += x
                sum_b[k] += y
        size = np.float64(starts[p + 1] - starts[p])
        for k in range(LANES):
            weight = np.float64(counts[owner[p], k])
            total[k] += weight * product[k]
            between[k] += weight * sum_a[k] * sum_b[k] / size
    return total, between
