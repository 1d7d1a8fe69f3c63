"""How correlated are two columns once far-out values are given no say?

    u = (x - med x) / (9 mad x),  a = (x - med x)(1 - u^2)^2 [|u| < 1],   r = a_x . a_y / (|a_x|
    |a_y|)

The biweight midcorrelation (Wilcox, *Introduction to Robust Estimation*, 2012, section 9.3.8; the
form of Langfelder and Horvath 2012), with the exact weighted median and median absolute deviation
of each resample found by walking one sort of the data.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from geomstats_lm.statistics.ranks import ratio


def resampled_biweight(
    x: np.ndarray, y: np.ndarray, cluster: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Biweight midcorrelation in each resample of clusters; arguments as `resampled_spearman`.

    NaN where more than half of a column's weight sits on one value (mad = 0), or a value is
    infinite.

    Examples
    --------
    >>> x = np.r_[np.arange(20.0), 1000.0]
    >>> y = np.r_[np.arange(20.0), -1000.0]
    >>> one = np.ones((1, 1), dtype=np.int16)
    >>> resampled_biweight(x, y, np.zeros(21, int), one).round(2)  # the outlier has no say
    array([0.99])
    """
    n_boot = counts.shape[1]
    if x.size == 0 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return np.full(n_boot, np.nan)
    cluster = np.ascontiguousarray(cluster, dtype=np.int32)
    sums = np.zeros((3, n_boot))
    _biweight_sums(
        np.ascontiguousarray(x, dtype=np.float64),
        np.argsort(x, kind="stable"),
        np.ascontiguousarray(y, dtype=np.float64),
        np.argsort(y, kind="stable"),
        cluster,
        np.ascontiguousarray(counts.T, dtype=np.int32),
        sums,
    )
    return ratio(sums[0], sums[1], sums[2])


@njit(nogil=True, cache=True, error_model="numpy")
def _biweight_sums(x, order_x, y, order_y, cluster, counts, sums):
    a_x = np.empty(x.size)
    a_y = np.empty(x.size)
    for b in range(counts.shape[0]):
        weights = counts[b]
        total = 0
        for i in range(x.size):
            total += weights[cluster[i]]
        fine = _biweight_deviations(x, order_x, cluster, weights, total, a_x)
        fine = _biweight_deviations(y, order_y, cluster, weights, total, a_y) and fine
        if not fine:
            continue  # sums stay zero, which `ratio` reads as degenerate
        cross, square_x, square_y = 0.0, 0.0, 0.0
        for i in range(x.size):
            weight = weights[cluster[i]]
            cross += weight * a_x[i] * a_y[i]
            square_x += weight * a_x[i] * a_x[i]
            square_y += weight * a_y[i] * a_y[i]
        sums[0, b], sums[1, b], sums[2, b] = cross, square_x, square_y


@njit(nogil=True, cache=True, error_model="numpy")
def _biweight_deviations(values, order, cluster, weights, total, out):
    """(v - med)(1 - u^2)^2 into `out`; False where the median absolute deviation is zero."""
    if total == 0:
        return False
    low, high = (total - 1) // 2, total // 2  # zero-based places of the middle one or two
    passed, middle = 0, 0
    lower = values[order[0]]
    found = False
    median = lower
    for position in range(order.size):
        passed += weights[cluster[order[position]]]
        if not found and passed > low:
            lower, found = values[order[position]], True
        if passed > high:
            median, middle = 0.5 * (lower + values[order[position]]), position
            break
    # distances from the median grow outwards on both sides: merge the two
    left, right = middle - 1, middle
    while left >= 0 and values[order[left]] > median:
        left -= 1
    right = left + 1
    passed, found = 0, False
    lower, spread = 0.0, 0.0
    while left >= 0 or right < order.size:
        to_left = median - values[order[left]] if left >= 0 else np.inf
        to_right = values[order[right]] - median if right < order.size else np.inf
        if to_left <= to_right:
            distance, row = to_left, order[left]
            left -= 1
        else:
            distance, row = to_right, order[right]
            right += 1
        passed += weights[cluster[row]]
        if not found and passed > low:
            lower, found = distance, True
        if passed > high:
            spread = 0.5 * (lower + distance)
            break
    if spread <= 0.0:
        return False
    for i in range(values.size):
        u = (values[i] - median) / (9.0 * spread)
        out[i] = (values[i] - median) * (1.0 - u * u) ** 2 if abs(u) < 1.0 else 0.0
    return True
