"""How much does each cluster move the correlation, without drawing anything?

    se^2 = G/(G-1) sum_g (sum_{i in g} IF_i)^2 / N^2,   IF = influence function of rho at the data

The score of the regression of standardized ranks on standardized ranks is the first term of IF;
the other terms are what ranking and standardizing cost. Without them the interval is right at rho
= 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit

from geomstats_lm.statistics.association import partial_from_matrix
from geomstats_lm.statistics.ranks import sort_once

WITH_INFLUENCE = ("spearman", "kendall", "pearson")


def clustered_std_errors(
    columns: np.ndarray,
    cluster: np.ndarray,
    counts: np.ndarray,
    *,
    method: str = "spearman",
    semipartial: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Correlation and its cluster-robust standard error in each resample.

    Parameters
    ----------
    columns, cluster, counts, method, semipartial
        As in `geomstats_lm.statistics.association.resampled_correlation`; "biweight" has no
        influence function here.

    Returns
    -------
    tuple of numpy.ndarray
        Correlations and standard errors, both (n_boot,); NaN where the resample is degenerate.

    Raises
    ------
    ValueError
        The method has no influence function here.

    Notes
    -----
    The influence function of Spearman's rho: Croux and Dehon, *Statistical Methods and
    Applications* 19, 2010; here with midranks, so that ties are allowed. Partial correlations by
    the chain rule.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> xy = rng.normal(size=(400, 2))
    >>> rho, se = clustered_std_errors(xy, np.arange(400), np.ones((400, 1), dtype=np.int16))
    >>> bool(abs(se[0] - 1 / np.sqrt(400)) < 0.005)
    True
    """
    if method not in WITH_INFLUENCE:
        raise ValueError(
            f"method={method!r} has no analytic standard error: use interval='percentile' or 'bca'"
        )
    width = columns.shape[1]
    prepared = {
        (i, j): _prepare(columns[:, i], columns[:, j], cluster, method)
        for i in range(width)
        for j in range(i + 1, width)
    }
    n_boot = counts.shape[1]
    estimates, errors = np.full(n_boot, np.nan), np.full(n_boot, np.nan)
    for b in range(n_boot):
        drawn = np.ascontiguousarray(counts[:, b], dtype=np.float64)
        matrix = np.eye(width)
        sums = {}
        for (i, j), influence in prepared.items():
            matrix[i, j], sums[i, j] = influence(drawn)
            matrix[j, i] = matrix[i, j]
        estimates[b], total = _chain(matrix, sums, semipartial)
        present = drawn.sum()
        size = float(np.bincount(cluster, minlength=drawn.size) @ drawn)
        if present > 1 and size > 0:
            variance = present / (present - 1) * np.sum(drawn * total**2) / size**2
            errors[b] = np.sqrt(variance)
    return estimates, errors


def _chain(
    matrix: np.ndarray, sums: dict[tuple[int, int], np.ndarray], semipartial: bool
) -> tuple[float, np.ndarray]:
    """Correlation from the matrix, and its clusters' influence by central differences."""
    if len(matrix) == 2:
        return float(matrix[0, 1]), sums[0, 1]
    step = 1e-6
    total = np.zeros_like(sums[0, 1])
    for (i, j), influence in sums.items():
        moved = np.stack([matrix, matrix])
        moved[0, i, j] = moved[0, j, i] = matrix[i, j] + step
        moved[1, i, j] = moved[1, j, i] = matrix[i, j] - step
        up, down = partial_from_matrix(moved, semipartial=semipartial)
        total = total + (up - down) / (2 * step) * influence
    return float(partial_from_matrix(matrix, semipartial=semipartial)), total


def _prepare(
    x: np.ndarray, y: np.ndarray, cluster: np.ndarray, method: str
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Sort once; the function returned maps counts (n_clusters,) to rho and influence sums."""
    cluster = np.ascontiguousarray(cluster, dtype=np.int32)
    if method == "pearson":
        x, y = x - x.mean(), y - y.mean()
        return lambda drawn: _pearson_influence(x, y, cluster, drawn)
    sorted_x, sorted_y = sort_once(x), sort_once(y)
    if method == "spearman":
        return lambda drawn: _spearman_influence(*sorted_x, *sorted_y, cluster, drawn)
    level_x, level_y = np.empty(x.size, np.int32), np.empty(x.size, np.int32)
    level_x[sorted_x[0]] = np.repeat(np.arange(sorted_x[1].size - 1), np.diff(sorted_x[1]))
    level_y[sorted_y[0]] = np.repeat(np.arange(sorted_y[1].size - 1), np.diff(sorted_y[1]))
    return lambda drawn: _kendall_influence(*sorted_x, level_x, level_y, cluster, drawn)


def _pearson_influence(x, y, cluster, drawn):
    weight = drawn[cluster]
    size = weight.sum()
    x = x - weight @ x / size
    y = y - weight @ y / size
    spread_x, spread_y = np.sqrt(weight @ x**2 / size), np.sqrt(weight @ y**2 / size)
    if not (spread_x > 0 and spread_y > 0):
        return np.nan, np.full(drawn.size, np.nan)
    x, y = x / spread_x, y / spread_y
    rho = float(weight @ (x * y) / size)
    influence = x * y - rho / 2 * (x**2 + y**2)
    return rho, np.bincount(cluster, weights=influence, minlength=drawn.size)


@njit(nogil=True, cache=True, error_model="numpy")
def _midranks(order, starts, cluster, drawn, out):
    """Centred weighted midranks as shares of the total weight; returns the total weight."""
    total = 0.0
    for i in range(order.size):
        total += drawn[cluster[i]]
    below = 0.0
    for s in range(starts.size - 1):
        tie = 0.0
        for q in range(starts[s], starts[s + 1]):
            tie += drawn[cluster[order[q]]]
        for q in range(starts[s], starts[s + 1]):
            out[order[q]] = (below + tie / 2.0) / total - 0.5
        below += tie
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _mean_above(order, starts, cluster, drawn, total, values, out):
    """mean_j values_j [j above i, ties half] into out_i, from the top of the order down."""
    above = 0.0
    for s in range(starts.size - 2, -1, -1):
        tie = 0.0
        for q in range(starts[s], starts[s + 1]):
            tie += drawn[cluster[order[q]]] * values[order[q]]
        for q in range(starts[s], starts[s + 1]):
            out[order[q]] = (above + tie / 2.0) / total
        above += tie


@njit(nogil=True, cache=True, error_model="numpy")
def _spearman_influence(order_x, starts_x, order_y, starts_y, cluster, drawn):
    n = order_x.size
    u, v = np.empty(n), np.empty(n)
    total = _midranks(order_x, starts_x, cluster, drawn, u)
    _midranks(order_y, starts_y, cluster, drawn, v)
    uv, uu, vv = 0.0, 0.0, 0.0
    for i in range(n):
        weight = drawn[cluster[i]] / total
        uv += weight * u[i] * v[i]
        uu += weight * u[i] * u[i]
        vv += weight * v[i] * v[i]
    sums = np.zeros(drawn.size)
    if uu <= 0.0 or vv <= 0.0:
        return np.nan, sums * np.nan
    # the ranks of all others move with each observation
    v_above_x, u_above_y, u_above_x, v_above_y = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    _mean_above(order_x, starts_x, cluster, drawn, total, v, v_above_x)
    _mean_above(order_y, starts_y, cluster, drawn, total, u, u_above_y)
    _mean_above(order_x, starts_x, cluster, drawn, total, u, u_above_x)
    _mean_above(order_y, starts_y, cluster, drawn, total, v, v_above_y)
    scale = np.sqrt(uu * vv)
    rho = uv / scale
    for i in range(n):
        on_uv = u[i] * v[i] + v_above_x[i] + u_above_y[i] - 3.0 * uv
        on_uu = u[i] * u[i] + 2.0 * u_above_x[i] - 3.0 * uu
        on_vv = v[i] * v[i] + 2.0 * v_above_y[i] - 3.0 * vv
        sums[cluster[i]] += on_uv / scale - rho / 2.0 * (on_uu / uu + on_vv / vv)
    return rho, sums


@njit(nogil=True, cache=True, error_model="numpy")
def _kendall_influence(order_x, starts_x, level_x, level_y, cluster, drawn):
    n = order_x.size
    top_x, top_y = starts_x.size - 1, level_y.max() + 1
    tie_x, tie_y = np.zeros(top_x), np.zeros(top_y)
    total = 0.0
    for i in range(n):
        weight = drawn[cluster[i]]
        tie_x[level_x[i]] += weight
        tie_y[level_y[i]] += weight
        total += weight
    score = np.zeros(n)
    tree = np.zeros(top_y + 1)
    for sweep in range(2):
        tree[:] = 0.0
        passed = 0.0
        for step in range(top_x):
            s = step if sweep == 0 else top_x - 1 - step
            for q in range(starts_x[s], starts_x[s + 1]):
                i = order_x[q]
                balance = -passed  # weight below in y minus weight above in y
                for above in range(2):
                    node = level_y[i] + above
                    while node > 0:
                        balance += tree[node]
                        node -= node & -node
                score[i] += balance if sweep == 0 else -balance
            for q in range(starts_x[s], starts_x[s + 1]):
                weight = drawn[cluster[order_x[q]]]
                node = level_y[order_x[q]] + 1
                while node <= top_y:
                    tree[node] += weight
                    node += node & -node
                passed += weight
    # tau-b is a ratio: the shares of pairs untied in x and in y move too
    mean_score, untied_x, untied_y = 0.0, 0.0, 0.0
    for i in range(n):
        weight = drawn[cluster[i]] / total
        mean_score += weight * score[i] / total
        untied_x += weight * (1.0 - tie_x[level_x[i]] / total)
        untied_y += weight * (1.0 - tie_y[level_y[i]] / total)
    sums = np.zeros(drawn.size)
    if untied_x <= 0.0 or untied_y <= 0.0:
        return np.nan, sums * np.nan
    scale = np.sqrt(untied_x * untied_y)
    tau = mean_score / scale
    for i in range(n):
        on_score = 2.0 * (score[i] / total - mean_score)
        on_x = 2.0 * (1.0 - tie_x[level_x[i]] / total - untied_x)
        on_y = 2.0 * (1.0 - tie_y[level_y[i]] / total - untied_y)
        sums[cluster[i]] += on_score / scale - tau / 2.0 * (on_x / untied_x + on_y / untied_y)
    return tau, sums
