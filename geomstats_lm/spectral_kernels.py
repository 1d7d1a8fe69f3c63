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
from geomstats_lm.linear_kernels import (
    FAST,
    add_outer_products,
    cholesky,
    dot_double,
    double_gram,
    inverse_trace,
    multiply,
    solve_cholesky,
    symmetric_eigen,
)


@njit(nogil=True, cache=True, fastmath=FAST)
def low_rank_combination(  # type: ignore[no-untyped-def]
    target_gram, lower, penalty, solution, rank, work, combination
):
    """Weights b on the k (scaled) targets of the rank-r ridge map, into ``combination`` (k,).

    ``target_gram`` (k, k) is D D' (lower half), ``lower`` the factor of K + lambda I, ``solution``
    w; ``work`` (4, k, k) float64 is scratch.
    """
    k = solution.size
    inverse, smoother, root, middle = work[0], work[1], work[2], work[3]
    inverse_trace(lower, inverse)
    for i in range(k):
        for p in range(k):
            smoother[i, p] = 0.0
        smoother[i, i] = 1.0
    add_outer_products(inverse, np.full(k, -penalty), smoother)
    # M has eigenvalues between 0 and 1; where it is singular its factor just drops columns
    cholesky(smoother, root, 1e-14)
    for j in range(k):
        root[j, j] = 1 / root[j, j] if root[j, j] > 0 else 0.0
        for p in range(j + 1, k):
            root[j, p] = 0.0
    for j in range(k):
        for p in range(k):
            smoother[j, p] = root[p, j]  # L'
            inverse[j, p] = target_gram[j, p] if j >= p else target_gram[p, j]
    multiply(smoother, inverse, middle)  # L' G
    for j in range(k):
        for p in range(k):
            inverse[j, p] = middle[j, p]
    multiply(inverse, root, middle)  # L' G L
    projected = np.empty(k)  # L' G w
    for j in range(k):
        value = 0.0
        for p in range(k):
            value += inverse[j, p] * solution[p]
        projected[j] = value
    values = np.empty(k)
    vectors = smoother
    symmetric_eigen(middle, values, vectors)
    largest = 0.0
    for j in range(k):
        largest = max(largest, values[j])
    chosen = np.zeros(k)
    taken = np.zeros(k, dtype=np.bool_)
    for _ in range(rank):
        best = -1
        for j in range(k):
            if not taken[j] and (best < 0 or values[j] > values[best]):
                best = j
        taken[best] = True
        if values[best] <= 1e-10 * largest or values[best] <= 0:
            break  # fewer directions than asked for carry anything
        share = 0.0
        for p in range(k):
            share += vectors[p, best] * projected[p]
        share /= values[best]
        for p in range(k):
            chosen[p] += share * vectors[p, best]
    for i in range(k):
        value = 0.0
        for p in range(i + 1):
            value += root[i, p] * chosen[p]
        combination[i] = value


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
    lower_x = np.zeros((k, k))
    lower_y = np.zeros((k, k))
    overlap = np.zeros((k, k))  # E_Y E_X'
    crossing = np.zeros((k, k))  # C_Y' C_X
    square = np.zeros((k, k))
    vectors = np.zeros((k, k))
    partial = np.zeros((k, k))  # U
    upper = np.zeros((k, k))
    solid = np.zeros((k, k))
    turned = np.zeros((k, k))  # U' E_Y E_X'
    values = np.empty(k)
    xi = np.empty(k)
    eta = np.empty(k)
    seen = np.empty(k)
    z = np.empty(k)
    a = np.empty(k)
    b = np.empty(k)
    on_x = np.empty(k)
    on_y = np.empty(k)
    span_x = np.empty(k)
    span_y = np.empty(k)
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
            xi[j] = dot_double(X[j], x)
            eta[j] = dot_double(Y[j], x)
        cholesky(gram_x[:k, :k], lower_x, 1e-10)
        cholesky(gram_y[:k, :k], lower_y, 1e-10)
        # S0 = C_Y^-1 (Y X') C_X^-T, and its transposed right factor first: rows are contiguous
        for j in range(k):
            for m in range(k):
                overlap[j, m] = gram_yx[j, m]
            forward_solve(lower_x, overlap[j])
        for j in range(k):
            for p in range(j):
                share = lower_y[j, p]
                for m in range(k):
                    overlap[j, m] -= share * overlap[p, m]
            for m in range(k):
                overlap[j, m] *= lower_y[j, j]
        forward_solve(lower_x, xi)
        forward_solve(lower_y, eta)
        # C_Y' C_X = U H by the eigenvectors of its square; tiny directions are left out of both
        for j in range(k):
            for m in range(k):
                upper[j, m] = lower_y[m, j] if m > j else 0.0
                solid[j, m] = lower_x[j, m] if m < j else 0.0
            upper[j, j] = diagonal_of(lower_y, j)
            solid[j, j] = diagonal_of(lower_x, j)
        multiply(upper, solid, crossing)
        product_of_columns(crossing, square)
        symmetric_eigen(square, values, vectors)
        multiply(crossing, vectors, solid)
        largest = 0.0
        for j in range(k):
            largest = max(largest, values[j])
        nuclear = 0.0
        for e in range(k):
            share = 0.0
            if values[e] > 1e-14 * largest and values[e] > 0:
                nuclear += np.sqrt(values[e])
                share = 1 / np.sqrt(values[e])
            for j in range(k):
                upper[e, j] = share * vectors[j, e]
        multiply(solid, upper, partial)
        for j in range(k):
            for m in range(k):
                upper[j, m] = partial[m, j]
        multiply(upper, overlap, turned)
        # complement: z = phi(S S') (F x - S xi), phi(c^2) = 1 / (c (1 + c))
        for j in range(k):
            value = 0.0
            for p in range(k):
                value += partial[p, j] * eta[p] - turned[j, p] * xi[p]
            seen[j] = value
        for j in range(k):
            for m in range(k):
                upper[j, m] = turned[m, j]
        multiply(turned, upper, square)
        symmetric_eigen(square, values, vectors)
        for j in range(k):
            z[j] = 0.0
        for e in range(k):
            cosine = max(np.sqrt(max(values[e], 0.0)), 1e-8)
            value = 0.0
            for j in range(k):
                value += vectors[j, e] * seen[j]
            value /= cosine * (1 + cosine)
            for j in range(k):
                z[j] += value * vectors[j, e]
        # Q x = x - E_X' (xi + S' z) + F' (xi + z - F y), with F = U' E_Y and y = x_perp + ...
        for m in range(k):
            a[m] = -xi[m]
        for j in range(k):
            share = z[j]
            for m in range(k):
                a[m] -= share * turned[j, m]
        for j in range(k):
            value = xi[j] - seen[j]
            for m in range(k):
                value -= turned[j, m] * (a[m] + xi[m])
            b[j] = value  # z cancels: F F' z = z on the directions that F has
        for j in range(k):
            value = 0.0
            for m in range(k):
                value += partial[j, m] * b[m]
            on_y[j] = value
            on_x[j] = a[j]
        backward_solve(lower_x, on_x)
        backward_solve(lower_y, on_y)
        # projection of x on the span of both, for the scale acts inside it only
        for j in range(k):
            for m in range(k):
                square[j, m] = 0.0
            value = eta[j]
            for m in range(k):
                value -= overlap[j, m] * xi[m]
            span_y[j] = value
        for j in range(k):
            for m in range(k):
                upper[j, m] = -overlap[m, j]
        multiply(overlap, upper, square)
        for j in range(k):
            square[j, j] += 1.0 if lower_y[j, j] > 0 else 0.0
        cholesky(square, vectors, 1e-11)
        solve_cholesky(vectors, span_y)
        for m in range(k):
            value = xi[m]
            for j in range(k):
                value -= overlap[j, m] * span_y[j]
            span_x[m] = value
        backward_solve(lower_x, span_x)
        backward_solve(lower_y, span_y)
        size = 0.0
        for j in range(k):
            size += gram_x[j, j]
        for c in range(scaled.size):
            s = nuclear / size if scaled[c] and size > 0 else 1.0
            out = predictions[c, i]
            # s Q x + (1 - s) (x - P x), less x unless the state is predicted
            for p in range(d):
                out[p] = x[p] if target_is_state else np.float32(0)
            for j in range(k):
                share_x = np.float32(s * on_x[j] - (1 - s) * span_x[j])
                share_y = np.float32(s * on_y[j] - (1 - s) * span_y[j])
                for p in range(d):
                    out[p] += share_x * X[j, p] + share_y * Y[j, p]


@njit(nogil=True, cache=True)
def diagonal_of(lower, j):  # type: ignore[no-untyped-def]
    return 1 / lower[j, j] if lower[j, j] > 0 else 0.0


@njit(nogil=True, cache=True, fastmath=FAST)
def forward_solve(lower, vector):  # type: ignore[no-untyped-def]
    """L^-1 v in place; zero where L dropped a column."""
    for i in range(vector.size):
        value = vector[i]
        for p in range(i):
            value -= lower[i, p] * vector[p]
        vector[i] = value * lower[i, i]


@njit(nogil=True, cache=True, fastmath=FAST)
def backward_solve(lower, vector):  # type: ignore[no-untyped-def]
    """L^-T v in place."""
    for i in range(vector.size - 1, -1, -1):
        value = vector[i] * lower[i, i]
        vector[i] = value
        for p in range(i):
            vector[p] -= lower[i, p] * value


@njit(nogil=True, cache=True, fastmath=FAST)
def product_of_columns(matrix, out):  # type: ignore[no-untyped-def]
    """A'A."""
    k = matrix.shape[0]
    for j in range(k):
        for m in range(k):
            out[j, m] = 0.0
    for p in range(k):
        for j in range(k):
            share = matrix[p, j]
            for m in range(k):
                out[j, m] += share * matrix[p, m]
