"""Which small dense operations does a fit of one token need, all within the cache?

Gram matrices ``X X'`` of k rows in 4 x 4 tiles, ``K = L L'`` for positive semidefinite K, its
solves, and ``K = W' diag(v) W`` by Householder reduction and implicit QL.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FAST = {"nsz", "nnan", "ninf", "reassoc", "contract", "arcp"}


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
def double_gram(Y, X, gram, lower):  # type: ignore[no-untyped-def]
    """Y X' in float64 of float32 rows, by 2 x 4 tiles; the lower half where that is all."""
    rows, d = X.shape
    for i in range(0, rows, 2):
        a0, a1 = Y[i], Y[i + 1]
        for j in range(0, i + 2 if lower else rows, 4):
            b0, b1, b2, b3 = X[j], X[j + 1], X[j + 2], X[j + 3]
            s00 = s01 = s02 = s03 = 0.0
            s10 = s11 = s12 = s13 = 0.0
            for p in range(d):
                x0, x1 = np.float64(a0[p]), np.float64(a1[p])
                y0, y1 = np.float64(b0[p]), np.float64(b1[p])
                y2, y3 = np.float64(b2[p]), np.float64(b3[p])
                s00 += x0 * y0
                s01 += x0 * y1
                s02 += x0 * y2
                s03 += x0 * y3
                s10 += x1 * y0
                s11 += x1 * y1
                s12 += x1 * y2
                s13 += x1 * y3
            gram[i, j], gram[i, j + 1], gram[i, j + 2], gram[i, j + 3] = s00, s01, s02, s03
            gram[i + 1, j], gram[i + 1, j + 1] = s10, s11
            gram[i + 1, j + 2], gram[i + 1, j + 3] = s12, s13


@njit(nogil=True, cache=True, fastmath=FAST)
def dot_double(a, b):  # type: ignore[no-untyped-def]
    total = 0.0
    for p in range(a.size):
        total += np.float64(a[p]) * np.float64(b[p])
    return total


@njit(nogil=True, cache=True, fastmath=FAST)
def cholesky(matrix, lower, tolerance):  # type: ignore[no-untyped-def]
    """Lower factor, its diagonal inverted; a pivot under tolerance x diagonal drops its column.

    A dropped column is zero and so is its inverted diagonal, which makes the triangular solves
    those of the rows that are kept.
    """
    k = matrix.shape[0]
    for j in range(k):
        pivot = matrix[j, j]
        for p in range(j):
            pivot -= lower[j, p] * lower[j, p]
        inverse = 1 / np.sqrt(pivot) if pivot > max(tolerance * matrix[j, j], 0.0) else 0.0
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
    """tr((L L')^-1) = ||L^-1||^2, with L^-1 left in ``inverse``."""
    k = lower.shape[0]
    total = 0.0
    for i in range(k):
        row = inverse[i]
        for p in range(k):
            row[p] = 0.0
        row[i] = 1.0
        for j in range(i):
            share = lower[i, j]
            before = inverse[j]
            for p in range(k):
                row[p] -= share * before[p]
        scale = lower[i, i]
        for p in range(k):
            row[p] *= scale
            total += row[p] * row[p]
    return total


@njit(nogil=True, cache=True, fastmath=FAST)
def add_outer_products(rows, scales, out):  # type: ignore[no-untyped-def]
    """out += sum_p scale_p row_p row_p', with full rows."""
    k = out.shape[0]
    for p in range(rows.shape[0]):
        row = rows[p]
        for i in range(k):
            share = scales[p] * row[i]
            into = out[i]
            for m in range(k):
                into[m] += share * row[m]


@njit(nogil=True, cache=True, fastmath=FAST)
def multiply(a, b, out):  # type: ignore[no-untyped-def]
    """out = a b for square matrices, one row of b after the other."""
    k = out.shape[0]
    for i in range(k):
        into = out[i]
        for m in range(k):
            into[m] = 0.0
        for p in range(k):
            share = a[i, p]
            row = b[p]
            for m in range(k):
                into[m] += share * row[m]


@njit(nogil=True, cache=True)
def positive_pivots(lower):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(lower.shape[0]):
        count += lower[j, j] > 0
    return count


@njit(nogil=True, cache=True, fastmath=FAST)
def symmetric_eigen(matrix, values, vectors):  # type: ignore[no-untyped-def]
    """Eigenvalues (unordered) and eigenvectors as columns; ``matrix`` (k, k) is overwritten.

    Loops run over whole rows even where the leading entries are zero: short loops of varying
    length cost more than the multiplications by zero.
    """
    n = values.size
    reflectors = np.zeros((n, n))
    rotated = np.zeros((n, n))
    beta = np.zeros(n)
    side = np.zeros(n)
    update = np.zeros(n)
    for j in range(n - 2):
        v = reflectors[j]
        norm = 0.0
        for p in range(j + 1, n):
            v[p] = matrix[j, p]
            norm += v[p] * v[p]
        norm = np.sqrt(norm)
        if norm < 1e-140:  # its square would leave the range of a double
            continue
        side[j] = -norm if v[j + 1] > 0 else norm
        beta[j] = 1 / (norm * (norm + abs(v[j + 1])))
        v[j + 1] -= side[j]
        inner = 0.0
        update[j] = 0.0
        for i in range(j + 1, n):
            total = 0.0
            row = matrix[i]
            for p in range(n):
                total += row[p] * v[p]
            update[i] = beta[j] * total
            inner += update[i] * v[i]
        half = 0.5 * beta[j] * inner
        for p in range(n):
            update[p] -= half * v[p]
        for i in range(j + 1, n):
            row = matrix[i]
            a, b = v[i], update[i]
            for p in range(n):
                row[p] -= a * update[p] + b * v[p]
    if n > 1:
        side[n - 2] = matrix[n - 2, n - 1]
    for i in range(n):
        values[i] = matrix[i, i]
        rotated[i, i] = 1.0
    largest = 0.0
    for i in range(n):
        largest = max(largest, abs(values[i]) + abs(side[i]))
    # implicit QL; eigenvectors are rows here, so that every rotation runs over memory
    for first in range(n):
        for _ in range(60):
            last = first
            while last < n - 1:
                scale = abs(values[last]) + abs(values[last + 1])
                if abs(side[last]) <= 1e-16 * scale + 1e-17 * largest:
                    break
                last += 1
            if last == first:
                break
            g = (values[first + 1] - values[first]) / (2 * side[first])
            r = np.sqrt(g * g + 1)
            g = values[last] - values[first] + side[first] / (g + (r if g >= 0 else -r))
            s = c = 1.0
            shift = 0.0
            stopped = False
            for i in range(last - 1, first - 1, -1):
                f = s * side[i]
                b = c * side[i]
                r = np.sqrt(f * f + g * g)
                side[i + 1] = r
                if r == 0:
                    values[i + 1] -= shift
                    side[last] = 0
                    stopped = True
                    break
                inverse = 1 / r
                s = f * inverse
                c = g * inverse
                g = values[i + 1] - shift
                r = (values[i] - g) * s + 2 * c * b
                shift = s * r
                values[i + 1] = g + shift
                g = c * r - b
                upper, under = rotated[i], rotated[i + 1]
                for p in range(n):
                    f = under[p]
                    under[p] = s * upper[p] + c * f
                    upper[p] = c * upper[p] - s * f
            if stopped:
                continue
            values[first] -= shift
            side[first] = g
            side[last] = 0
    for i in range(n):
        for p in range(n):
            vectors[i, p] = rotated[p, i]
    # back through the reflectors, all eigenvectors at once
    for j in range(n - 3, -1, -1):
        if beta[j] == 0:
            continue
        v = reflectors[j]
        for p in range(n):
            update[p] = 0.0
        for i in range(j + 1, n):
            share = beta[j] * v[i]
            for p in range(n):
                update[p] += share * vectors[i, p]
        for i in range(j + 1, n):
            share = v[i]
            for p in range(n):
                vectors[i, p] -= share * update[p]
