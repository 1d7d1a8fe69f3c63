"""How are all local maps of one token fitted in one pass that stays in cache?

With the k neighbours as rows of X (centred on their mean) and their updates D, one half Gram
``C = X X'`` and one Cholesky factor of ``C + lambda I`` per ridge give every class's prediction as
a combination ``W D`` of the k updates, ``w = (C + lambda I)^-1 X x``; no d x d matrix appears.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from geomstats_lm.linear_kernels import (
    FAST,
    apply_transposed_inverse,
    dot_double,
    double_gram,
    eliminate,
    half_gram,
    positive_pivots,
)
from geomstats_lm.spectral_kernels import low_rank_combination

# Kinds of local maps, in the numbering that the kernel and its caller share.
LOCAL_MEAN, SCALAR, DIAGONAL, LINEAR, AFFINE, LOW_RANK = range(6)


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
    gram = np.zeros((padded, padded), dtype=np.float64)
    precise = k > d  # K is singular then, and rounding must not fill its null space
    systems = np.zeros((n_factors, padded, padded), dtype=np.float64)
    right = np.zeros(padded, dtype=np.float64)
    solution = np.zeros((n_factors, padded), dtype=np.float64)
    penalty = np.zeros(n_factors, dtype=np.float64)
    trace_df = np.zeros(n_factors, dtype=np.float64)
    along_query = np.zeros(padded, dtype=np.float64)
    along_mean = np.zeros(padded, dtype=np.float64)
    root = np.zeros(padded, dtype=np.float32)
    combination = np.zeros((n_classes, padded), dtype=np.float32)
    want_df = effective_df.size > 0
    nothing = neighbours[0, :0]
    if spectral is not None:
        target_rows = np.zeros((padded, d), dtype=np.float32)
        target_gram = np.zeros((padded, padded), dtype=np.float64)
        work = np.zeros((4, padded, padded), dtype=np.float64)
        weighted = np.zeros(padded, dtype=np.float64)
    for i in range(n):
        # 1. gather, and centre on the neighbours' own mean: differences of near states are exact
        for p in range(d):
            mean[p] = 0
        for j in range(k):
            row = states[neighbours[i, j]]
            share = weights[i, j]
            own_row = X[j]
            for p in range(d):
                own_row[p] = row[p]
                mean[p] += share * row[p]
        mean_square = 0.0
        mean_offset = 0.0
        for p in range(d):
            offset[p] = queries[i, p] - mean[p]
            raw_mean[p] = mean[p] + centre[p]
            mean_square += np.float64(raw_mean[p]) * np.float64(raw_mean[p])
            mean_offset += np.float64(raw_mean[p]) * np.float64(offset[p])
        trace = 0.0
        for j in range(k):
            root[j] = np.sqrt(weights[i, j] * np.float32(k))
            scale = root[j]
            row = X[j]
            a = np.float32(0)
            b = np.float32(0)
            own = np.float32(0)
            for p in range(d):
                value = scale * (row[p] - mean[p])
                row[p] = value
                a += value * offset[p]
                b += value * raw_mean[p]
                own += value * value
            along_query[j] = dot_double(row, offset) if precise else np.float64(a)
            along_mean[j] = dot_double(row, raw_mean) if precise else np.float64(b)
            trace += np.float64(own)
        # 2. one half Gram serves every system
        following = neighbours[i + 1] if i + 1 < n else nothing
        if n_factors > 0:
            if precise:
                double_gram(X, X, gram, False)
            else:
                half_gram(X, gram, targets, neighbours[i], states, following)
        raw_trace = trace
        for j in range(k):
            raw_trace += root[j] * (2 * along_mean[j] + root[j] * mean_square)
        # 3. factorize and solve each distinct system
        for f in range(n_factors):
            centred = factor_centred[f]
            system = systems[f]
            for a_row in range(padded):
                line, source = system[a_row], gram[a_row]
                if centred:
                    for b_row in range(padded):
                        line[b_row] = source[b_row]
                    right[a_row] = along_query[a_row]
                    continue
                # X = centred X + root mean', so that nothing large is ever subtracted
                scale, shift = root[a_row], along_mean[a_row] + root[a_row] * mean_square
                for b_row in range(padded):
                    line[b_row] = source[b_row] + scale * along_mean[b_row] + shift * root[b_row]
                right[a_row] = along_query[a_row] + shift + scale * mean_offset
            penalty[f] = factor_ridge[f] * (trace if centred else raw_trace) / min(k, d)
            penalty[f] += 1e-6 * mean_square
            for a_row in range(k):
                system[a_row, a_row] += penalty[f]
            eliminate(system, right, 1e-13)
            inverse_trace = apply_transposed_inverse(system, right, solution[f])
            trace_df[f] = k - penalty[f] * inverse_trace
            if penalty[f] <= 0:
                trace_df[f] = positive_pivots(system)
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
        if spectral is not None:
            for j in range(k):
                row = targets[neighbours[i, j]]
                for p in range(d):
                    target_rows[j, p] = root[j] * row[p]
            half_gram(target_rows, target_gram, targets, nothing, targets, nothing)
            for c in range(n_classes):
                if kinds[c] == LOW_RANK:
                    f = factors[c]
                    rank = min(ranks[c], k)
                    low_rank_combination(
                        target_gram, systems[f], penalty[f], solution[f], rank, work, weighted
                    )
                    for j in range(k):
                        combination[c, j] = root[j] * weighted[j]
        for c in range(n_classes):
            combine(targets, neighbours[i], combination[c], predictions[c, i])
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
                combine(states, neighbours[i], combination[c], out)
                total = 0.0
                for j in range(k):
                    total += combination[c, j]
                for p in range(d):
                    out[p] += np.float32(total) * centre[p]


@njit(nogil=True, cache=True, fastmath=FAST)
def combine(source, rows, shares, out):  # type: ignore[no-untyped-def]
    """out = sum_j share_j source[row_j], four rows at a time."""
    k, d = rows.size, out.size
    for p in range(d):
        out[p] = 0
    whole = k // 4 * 4
    for j in range(0, whole, 4):
        a, b, c, e = shares[j], shares[j + 1], shares[j + 2], shares[j + 3]
        row_a, row_b = source[rows[j]], source[rows[j + 1]]
        row_c, row_d = source[rows[j + 2]], source[rows[j + 3]]
        for p in range(d):
            out[p] += a * row_a[p] + b * row_b[p] + (c * row_c[p] + e * row_d[p])
    for j in range(whole, k):
        share, row = shares[j], source[rows[j]]
        for p in range(d):
            out[p] += share * row[p]


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
