"""How do the low-rank and the orthogonal map of one token come from k x k matrices alone?

Low rank: top eigenpairs of ``L' D D' L`` with ``M = I - lambda (K + lambda I)^-1 = L L'``.
Orthogonal: ``Q = polar(Y'X + mu I)`` as mu tends to 0, from bases ``X = C_X E_X``, ``Y = C_Y E_Y``:
with ``C_Y' C_X = U H`` it maps the span of X by ``E_Y' U E_X`` and its complement by the polar
factor of the product of the two complements' projections; off both spans it is the identity.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Cached by the date of this file, as in local_kernels.
from geomstats_lm.eigen_kernels import leading_eigen, symmetric_eigen
from geomstats_lm.linear_kernels import (
    FAST,
    apply_transposed_inverse,
    dot_double,
    double_gram,
    eliminate,
    multiply_transposed,
    prefetch_row,
    split_factor,
    transpose,
)


@njit(nogil=True, cache=True, fastmath=FAST)
def low_rank_combination(  # type: ignore[no-untyped-def]
    target_gram, factor, penalty, solution, rank, work, combination
):
    """Weights b on the k (scaled) targets of the rank-r ridge map, into ``combination`` (k,).

    ``target_gram`` (k, k) is D D' (upper half), ``factor`` that of K + lambda I by ``eliminate``,
    ``solution`` w; ``work`` (4, k, k) float64 is scratch.
    """
    k = solution.size
    inverse, smoother, root, middle = work[0], work[1], work[2], work[3]
    split_factor(factor, inverse, root)
    transpose(inverse, root)
    multiply_transposed(root, root, smoother)  # (K + lambda I)^-1
    for i in range(k):
        for p in range(k):
            smoother[i, p] *= -penalty
        smoother[i, i] += 1.0
    # M has eigenvalues between 0 and 1; where it is singular its factor just drops columns
    projected = np.zeros(k)
    eliminate(smoother, projected, 1e-14)
    split_factor(smoother, middle, root)  # root = L'
    for j in range(k):
        for p in range(k):
            inverse[j, p] = target_gram[j, p] if j <= p else target_gram[p, j]
    multiply_transposed(root, inverse, smoother)  # L' G
    multiply_transposed(smoother, root, middle)  # L' G L
    for j in range(k):
        value = 0.0
        for p in range(k):
            value += smoother[j, p] * solution[p]
        projected[j] = value
    values = np.empty(k)
    count = leading_eigen(middle, rank, values, inverse)
    chosen = np.zeros(k)
    for e in range(count):  # fewer than the rank where no more directions carry anything
        share = 0.0
        for p in range(k):
            share += inverse[e, p] * projected[p]
        share /= values[e]
        for p in range(k):
            chosen[p] += share * inverse[e, p]
    for i in range(k):
        combination[i] = 0.0
    for j in range(k):
        for i in range(k):
            combination[i] += root[j, i] * chosen[j]


@njit(nogil=True, cache=True, fastmath=FAST)
def fit_orthogonal(  # type: ignore[no-untyped-def]
    queries, neighbours, weights, states, centre, targets, target_is_state, scaled, predictions
):
    """Fit Q and s on each query's neighbours; write s Q x - x, or s Q x where ``target_is_state``.

    Shapes as in ``fit_neighbourhoods``; ``scaled`` (c,) bool says which of the c variants written
    to ``predictions`` (c, n, d) have the scale s, the others have s = 1.
    """
    n, k = neighbours.shape
    d = queries.shape[1]
    padded = (k + 3) // 4 * 4
    X = np.zeros((padded, d), dtype=np.float32)
    Y = np.zeros((padded, d), dtype=np.float32)
    x = np.empty(d, dtype=np.float32)
    gram_x = np.zeros((padded, padded))
    gram_y = np.zeros((padded, padded))
    gram_yx = np.zeros((padded, padded))
    factor_x = np.zeros((padded, padded))
    factor_y = np.zeros((padded, padded))
    upper_x = np.zeros((padded, padded))  # C_X'
    upper_y = np.zeros((padded, padded))
    overlap = np.zeros((padded, padded))  # E_Y E_X'
    crossing = np.zeros((padded, padded))  # C_X' C_Y
    square = np.zeros((padded, padded))
    vectors = np.zeros((padded, padded))
    partial = np.zeros((padded, padded))  # U'
    scratch = np.zeros((padded, padded))
    turned = np.zeros((padded, padded))  # U' E_Y E_X'
    values = np.empty(padded)
    along_x = np.zeros(padded)
    along_y = np.zeros(padded)
    xi = np.empty(padded)
    eta = np.empty(padded)
    seen = np.empty(padded)
    z = np.empty(padded)
    a = np.empty(padded)
    b = np.empty(padded)
    on_x = np.empty(padded)
    on_y = np.empty(padded)
    span_x = np.empty(padded)
    span_y = np.empty(padded)
    for i in range(n):
        for p in range(d):
            x[p] = queries[i, p] + centre[p]
        for j in range(k):
            root = np.sqrt(weights[i, j] * np.float32(k))
            state = states[neighbours[i, j]]
            target = targets[neighbours[i, j]]
            for p in range(d):
                raw = state[p] + centre[p]
                X[j, p] = root * raw
                Y[j, p] = root * (target[p] if target_is_state else raw + target[p])
        double_gram(X, X, gram_x, True)
        double_gram(Y, Y, gram_y, True)
        double_gram(Y, X, gram_yx, False)
        for j in range(k):
            along_x[j] = dot_double(X[j], x)
            along_y[j] = dot_double(Y[j], x)
        size = 0.0
        for j in range(k):
            size += gram_x[j, j]
        # E_X = C_X^-1 X, E_Y = C_Y^-1 Y
        transpose(gram_x, factor_x)
        transpose(gram_y, factor_y)
        for j in range(padded):
            xi[j], eta[j] = along_x[j], along_y[j]
        eliminate(factor_x, xi, 1e-10)
        eliminate(factor_y, eta, 1e-10)
        split_factor(factor_x, scratch, upper_x)
        multiply_transposed(gram_yx, scratch, vectors)
        split_factor(factor_y, scratch, upper_y)
        transpose(vectors, square)
        multiply_transposed(scratch, square, overlap)
        # C_Y' C_X = U H by the eigenvectors of its square; tiny directions are left out of both
        multiply_transposed(upper_x, upper_y, crossing)
        multiply_transposed(crossing, crossing, square)
        if i + 1 < n:  # memory works on the next query meanwhile
            for j in range(k):
                prefetch_row(states, neighbours[i + 1, j])
                prefetch_row(targets, neighbours[i + 1, j])
        symmetric_eigen(square, values, vectors)
        largest = 0.0
        for j in range(padded):
            largest = max(largest, values[j])
        nuclear = 0.0
        for e in range(padded):
            share = 0.0
            if values[e] > 1e-14 * largest and values[e] > 0:
                nuclear += np.sqrt(values[e])
                share = 1 / np.sqrt(values[e])
            for j in range(padded):
                square[e, j] = share * vectors[e, j]
        # U' = (C_X' C_Y C_Y' C_X)^(-1/2) C_X' C_Y
        transpose(vectors, scratch)
        transpose(square, vectors)
        multiply_transposed(vectors, scratch, square)
        transpose(crossing, scratch)
        multiply_transposed(square, scratch, partial)
        transpose(overlap, scratch)
        multiply_transposed(partial, scratch, turned)
        # complement: z = phi(S S') (F x - S xi), phi(c^2) = 1 / (c (1 + c))
        for j in range(padded):
            value = 0.0
            for p in range(padded):
                value += partial[j, p] * eta[p] - turned[j, p] * xi[p]
            seen[j] = value
            z[j] = 0.0
        multiply_transposed(turned, turned, square)
        symmetric_eigen(square, values, vectors)
        for e in range(padded):
            cosine = max(np.sqrt(max(values[e], 0.0)), 1e-8)
            value = 0.0
            for j in range(padded):
                value += vectors[e, j] * seen[j]
            value /= cosine * (1 + cosine)
            for j in range(padded):
                z[j] += value * vectors[e, j]
        # Q x = x - E_X' (xi + S' z) + F' (xi + z - F y), with F = U' E_Y and y = x_perp + ...
        for m in range(padded):
            a[m] = -xi[m]
            on_y[m] = 0.0
        for j in range(padded):
            share = z[j]
            for m in range(padded):
                a[m] -= share * turned[j, m]
        for j in range(padded):
            value = xi[j] - seen[j]
            for m in range(padded):
                value -= turned[j, m] * (a[m] + xi[m])
            b[j] = value  # z cancels: F F' z = z on the directions that F has
        for m in range(padded):
            share = b[m]
            for j in range(padded):
                on_y[j] += share * partial[m, j]
        apply_transposed_inverse(factor_x, a, on_x)
        for j in range(padded):
            b[j] = on_y[j]
        apply_transposed_inverse(factor_y, b, on_y)
        # projection of x on the span of both, for the scale acts inside it only
        multiply_transposed(overlap, overlap, square)
        for j in range(padded):
            value = eta[j]
            for m in range(padded):
                value -= overlap[j, m] * xi[m]
                square[j, m] = -square[j, m]
            seen[j] = value
            square[j, j] += 1.0 if factor_y[j, j] > 0 else 0.0
        eliminate(square, seen, 1e-11)
        apply_transposed_inverse(square, seen, b)
        for m in range(padded):
            a[m] = xi[m]
        for j in range(padded):
            share = b[j]
            for m in range(padded):
                a[m] -= share * overlap[j, m]
        apply_transposed_inverse(factor_x, a, span_x)
        apply_transposed_inverse(factor_y, b, span_y)
        for c in range(scaled.size):
            s = nuclear / size if scaled[c] and size > 0 else 1.0
            out = predictions[c, i]
            # s Q x + (1 - s) (x - P x), less x unless the state is predicted
            for p in range(d):
                out[p] = x[p] if target_is_state else np.float32(0)
            for j in range(k):
                share_x = np.float32(s * on_x[j] - (1 - s) * span_x[j])
                share_y = np.float32(s * on_y[j] - (1 - s) * span_y[j])
                row_x, row_y = X[j], Y[j]
                for p in range(d):
                    out[p] += share_x * row_x[p] + share_y * row_y[p]
