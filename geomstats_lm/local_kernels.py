"""How are all local maps of one token fitted in one pass that stays in cache?

With the k neighbours as rows of X (centred on their mean) and their updates D, one half Gram
``C = X X'`` and one Cholesky factor of ``C + lambda I`` per ridge give every class's prediction as
a combination ``W D`` of the k updates, ``w = (C + lambda I)^-1 X x``; no d x d matrix appears.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Kinds of local maps, in the numbering that the kernel and its caller share.
LOCAL_MEAN, SCALAR, DIAGONAL, LINEAR, AFFINE, LOW_RANK = range(6)
FAST = {"nsz", "nnan", "ninf", "reassoc", "contract", "arcp"}


@njit(nogil=True, cache=True, fastmath=FAST)
def fit_neighbourhoods(  # type: ignore[no-untyped-def]
    queries,
    neighbours,
    weights,
    states,
    centre,
    targets,
    factor_centred,
    factor_ridge,
    kinds,
    factors,
    ridges,
    ranks,
    predictions,
    reconstructions,
    reconstructed,
    effective_df,
    spectral,
):
    """Fit all local maps of each query and predict its target.

    Parameters
    ----------
    queries : (n, d) float32
        States about ``centre``.
    neighbours : (n, k) int64
        Rows of ``states`` and ``targets``.
    weights : (n, k) float32, each row summing to one
    states, targets : (N, d) float32
        Reference states about ``centre``, and their updates (or next states).
    centre : (d,) float32
    factor_centred : (f,) bool; factor_ridge : (f,) float64
        The distinct systems to factorize: on centred or raw states, with which rho.
    kinds, factors, ranks : (c,) int64; ridges : (c,) float64
        One entry per class: its kind, its system (-1: none), its rank, its rho.
    predictions : (c, n, d) float32, written
    reconstructions : (c,) int64
        Row of ``reconstructed`` (r, n, d) that receives X' w of the class, -1 for none.
    effective_df : (c, n) float32 or (0, 0), written
    spectral : None, or True where a class of kind LOW_RANK is among them
        None leaves its code out of the compilation.
    """
    n, k = neighbours.shape
    d = queries.shape[1]
    padded = (k + 3) // 4 * 4
    n_classes = kinds.size
    n_factors = factor_ridge.size
    X = np.zeros((padded, d), dtype=np.float32)
    mean = np.empty(d, dtype=np.float32)
    offset = np.empty(d, dtype=np.float32)
    raw_mean = np.empty(d, dtype=np.float32)
    target_mean = np.empty(d, dtype=np.float32)
    gram = np.zeros((padded, padded), dtype=np.float32)
    system = np.empty((k, k), dtype=np.float64)
    lower = np.zeros((n_factors, k, k), dtype=np.float64)
    solution = np.zeros((n_factors, k), dtype=np.float64)
    penalty = np.zeros(n_factors, dtype=np.float64)
    trace_df = np.zeros(n_factors, dtype=np.float64)
    along_query = np.zeros(k, dtype=np.float64)
    along_mean = np.zeros(k, dtype=np.float64)
    root = np.ones(k, dtype=np.float32)
    combination = np.zeros((n_classes, k), dtype=np.float32)
    want_df = effective_df.size > 0
    for i in range(n):
        # 1. gather, and centre on the neighbours' own mean: differences of near states are exact
        for p in range(d):
            mean[p] = 0
        for j in range(k):
            row = states[neighbours[i, j]]
            share = weights[i, j]
            for p in range(d):
                X[j, p] = row[p]
                mean[p] += share * row[p]
        for j in range(k):
            root[j] = np.sqrt(weights[i, j] * np.float32(k))
            scale = root[j]
            for p in range(d):
                X[j, p] = scale * (X[j, p] - mean[p])
        mean_square = 0.0
        mean_offset = 0.0
        for p in range(d):
            offset[p] = queries[i, p] - mean[p]
            raw_mean[p] = mean[p] + centre[p]
            mean_square += np.float64(raw_mean[p]) * np.float64(raw_mean[p])
            mean_offset += np.float64(raw_mean[p]) * np.float64(offset[p])
        # 2. one half Gram and two projections serve every system
        if n_factors > 0:
            half_gram(X, gram)
        trace = 0.0
        for j in range(k):
            row = X[j]
            a = np.float32(0)
            b = np.float32(0)
            own = np.float32(0)
            for p in range(d):
                a += row[p] * offset[p]
                b += row[p] * raw_mean[p]
                own += row[p] * row[p]
            along_query[j] = a
            along_mean[j] = b
            trace += np.float64(own)
        raw_trace = trace
        for j in range(k):
            raw_trace += root[j] * (2 * along_mean[j] + root[j] * mean_square)
        # 3. factorize and solve each distinct system
        for f in range(n_factors):
            centred = factor_centred[f]
            for a_row in range(k):
                for b_row in range(a_row + 1):
                    value = np.float64(gram[a_row, b_row])
                    if not centred:
                        value += (
                            root[a_row] * along_mean[b_row]
                            + root[b_row] * along_mean[a_row]
                            + root[a_row] * root[b_row] * mean_square
                        )
                    system[a_row, b_row] = value
                solution[f, a_row] = along_query[a_row]
                if not centred:
                    solution[f, a_row] += along_mean[a_row] + root[a_row] * (
                        mean_offset + mean_square
                    )
            penalty[f] = factor_ridge[f] * (trace if centred else raw_trace) / min(k, d)
            penalty[f] += 1e-6 * mean_square
            for a_row in range(k):
                system[a_row, a_row] += penalty[f]
            cholesky(system, lower[f])
            solve_cholesky(lower[f], solution[f])
            if want_df:
                trace_df[f] = k - penalty[f] * inverse_trace(lower[f], system)
                if penalty[f] <= 0:
                    trace_df[f] = positive_pivots(lower[f])
        # 4. each class as weights on the k targets
        for c in range(n_classes):
            f = factors[c]
            if kinds[c] == LINEAR:
                for j in range(k):
                    combination[c, j] = root[j] * solution[f, j]
            elif kinds[c] == AFFINE:
                total = 0.0
                for j in range(k):
                    total += root[j] * solution[f, j]
                for j in range(k):
                    combination[c, j] = root[j] * solution[f, j] + weights[i, j] * (1 - total)
            elif kinds[c] == LOCAL_MEAN or kinds[c] == DIAGONAL:
                for j in range(k):
                    combination[c, j] = weights[i, j]
            else:
                for j in range(k):
                    combination[c, j] = 0
        for c in range(n_classes):
            for p in range(d):
                predictions[c, i, p] = 0
        for j in range(k):
            row = targets[neighbours[i, j]]
            for c in range(n_classes):
                share = combination[c, j]
                out = predictions[c, i]
                for p in range(d):
                    out[p] += share * row[p]
        # 5. the classes that are no combination of targets, and what else is asked for
        for c in range(n_classes):
            if kinds[c] == DIAGONAL:
                for p in range(d):
                    target_mean[p] = predictions[c, i, p]
                df = diagonal_prediction(
                    X, neighbours[i], root, targets, target_mean, offset, ridges[c],
                    predictions[c, i],
                )  # fmt: skip
                if want_df:
                    effective_df[c, i] = df
            elif kinds[c] == SCALAR:
                cross = 0.0
                for j in range(k):
                    row = targets[neighbours[i, j]]
                    scale = root[j]
                    part = np.float32(0)
                    for p in range(d):
                        part += (X[j, p] + scale * raw_mean[p]) * row[p]
                    cross += scale * part
                size = raw_trace * (1 + ridges[c])
                slope = np.float32(cross / size if size > 0 else 0.0)
                for p in range(d):
                    predictions[c, i, p] = slope * (queries[i, p] + centre[p])
                if want_df:
                    effective_df[c, i] = 1 / ((1 + ridges[c]) * d)
            elif want_df:
                if kinds[c] == LOCAL_MEAN:
                    effective_df[c, i] = 1
                elif kinds[c] == LINEAR:
                    effective_df[c, i] = trace_df[factors[c]]
                elif kinds[c] == AFFINE:
                    effective_df[c, i] = 1 + trace_df[factors[c]]
                elif kinds[c] == LOW_RANK:
                    rank = min(ranks[c], trace_df[factors[c]])
                    effective_df[c, i] = rank * (trace_df[factors[c]] + d - rank) / d
            if reconstructions[c] >= 0:
                out = reconstructed[reconstructions[c], i]
                for p in range(d):
                    out[p] = 0
                for j in range(k):
                    share = combination[c, j]
                    row = states[neighbours[i, j]]
                    for p in range(d):
                        out[p] += share * (row[p] + centre[p])


@njit(nogil=True, cache=True, fastmath=FAST)
def half_gram(X, gram):  # type: ignore[no-untyped-def]
    """Lower 4 x 4 tiles of X X': sixteen sums at once keep the multiply-add units busy."""
    rows, d = X.shape
    for i in range(0, rows, 4):
        a0, a1, a2, a3 = X[i], X[i + 1], X[i + 2], X[i + 3]
        for j in range(0, i + 1, 4):
            b0, b1, b2, b3 = X[j], X[j + 1], X[j + 2], X[j + 3]
            s00 = s01 = s02 = s03 = np.float32(0)
            s10 = s11 = s12 = s13 = np.float32(0)
            s20 = s21 = s22 = s23 = np.float32(0)
            s30 = s31 = s32 = s33 = np.float32(0)
            for p in range(d):
                x0, x1, x2, x3 = a0[p], a1[p], a2[p], a3[p]
                y0, y1, y2, y3 = b0[p], b1[p], b2[p], b3[p]
                s00 += x0 * y0
                s01 += x0 * y1
                s02 += x0 * y2
                s03 += x0 * y3
                s10 += x1 * y0
                s11 += x1 * y1
                s12 += x1 * y2
                s13 += x1 * y3
                s20 += x2 * y0
                s21 += x2 * y1
                s22 += x2 * y2
                s23 += x2 * y3
                s30 += x3 * y0
                s31 += x3 * y1
                s32 += x3 * y2
                s33 += x3 * y3
            gram[i, j], gram[i, j + 1], gram[i, j + 2], gram[i, j + 3] = s00, s01, s02, s03
            gram[i + 1, j], gram[i + 1, j + 1] = s10, s11
            gram[i + 1, j + 2], gram[i + 1, j + 3] = s12, s13
            gram[i + 2, j], gram[i + 2, j + 1] = s20, s21
            gram[i + 2, j + 2], gram[i + 2, j + 3] = s22, s23
            gram[i + 3, j], gram[i + 3, j + 1] = s30, s31
            gram[i + 3, j + 2], gram[i + 3, j + 3] = s32, s33


@njit(nogil=True, cache=True, fastmath=FAST)
def cholesky(matrix, lower):  # type: ignore[no-untyped-def]
    """Lower factor, the diagonal inverted; a pivot that is numerically zero drops its column."""
    k = matrix.shape[0]
    for j in range(k):
        pivot = matrix[j, j]
        for p in range(j):
            pivot -= lower[j, p] * lower[j, p]
        inverse = 1 / np.sqrt(pivot) if pivot > 1e-13 * matrix[j, j] and pivot > 0 else 0.0
        lower[j, j] = inverse
        for i in range(j + 1, k):
            value = matrix[i, j]
            for p in range(j):
                value -= lower[i, p] * lower[j, p]
            lower[i, j] = value * inverse


@njit(nogil=True, cache=True, fastmath=FAST)
def solve_cholesky(lower, vector):  # type: ignore[no-untyped-def]
    """Solve L L' w = vector in place, L as :func:`cholesky` leaves it."""
    k = vector.size
    for i in range(k):
        value = vector[i]
        for p in range(i):
            value -= lower[i, p] * vector[p]
        vector[i] = value * lower[i, i]
    for i in range(k - 1, -1, -1):
        value = vector[i] * lower[i, i]
        vector[i] = value
        for p in range(i):
            vector[p] -= lower[i, p] * value


@njit(nogil=True, cache=True, fastmath=FAST)
def inverse_trace(lower, inverse):  # type: ignore[no-untyped-def]
    """tr((L L')^-1) = ||L^-1||^2, with L^-1 left transposed in ``inverse``."""
    k = lower.shape[0]
    total = 0.0
    for j in range(k):  # column j of the inverse lies contiguous in row j
        column = inverse[j]
        column[j] = lower[j, j]
        total += column[j] * column[j]
        for i in range(j + 1, k):
            value = 0.0
            for p in range(j, i):
                value += lower[i, p] * column[p]
            column[i] = -value * lower[i, i]
            total += column[i] * column[i]
    return total


@njit(nogil=True, cache=True)
def positive_pivots(lower):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(lower.shape[0]):
        count += lower[j, j] > 0
    return count


@njit(nogil=True, cache=True, fastmath=FAST)
def diagonal_prediction(X, rows, root, targets, target_mean, offset, ridge, out):  # type: ignore[no-untyped-def]
    """One regression per dim, each slope shrunk by rho times the mean variation of the dims."""
    k, d = rows.size, out.size
    cross = np.zeros(d, dtype=np.float32)
    variation = np.zeros(d, dtype=np.float32)
    for j in range(k):
        target = targets[rows[j]]
        scale = root[j]
        for p in range(d):
            cross[p] += X[j, p] * (scale * (target[p] - target_mean[p]))
            variation[p] += X[j, p] * X[j, p]
    total = 0.0
    for p in range(d):
        total += variation[p]
    shrinkage = np.float32(ridge * total / d)
    df = 0.0
    for p in range(d):
        size = variation[p] + shrinkage
        if size > 0:
            out[p] = target_mean[p] + offset[p] * (cross[p] / size)
            df += variation[p] / size
    return 1 + df / d
