"""Which eigenpairs does a small symmetric matrix have, and which are its leading ones?

Householder reflections ``A = H T H'`` to a tridiagonal T; then all pairs by implicit QL, or the
leading ones by bisection and inverse iteration.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FAST = {"nsz", "nnan", "ninf", "reassoc", "contract", "arcp"}
SMALL = 2e-16  # beside its neighbours on the diagonal an entry of T this small is zero
TINY = 1e-17  # beside all of T


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def symmetric_eigen(matrix, values, vectors):  # type: ignore[no-untyped-def]
    """Eigenvalues (unordered) and eigenvectors as rows; ``matrix`` (k, k) is overwritten."""
    n = values.size
    reflectors = np.empty((n, n))
    beta = np.zeros(n)
    side = np.zeros(n)
    tridiagonalize(matrix, reflectors, beta, values, side)
    largest = 0.0
    for i in range(n):
        largest = max(largest, abs(values[i]) + abs(side[i]))
    multiply_reflections(reflectors, beta, vectors)
    for first in range(n):
        for _ in range(60):
            last = first
            while last < n - 1:
                scale = abs(values[last]) + abs(values[last + 1])
                if abs(side[last]) <= SMALL * scale + TINY * largest:
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
                upper, under = vectors[i], vectors[i + 1]
                for p in range(n):
                    f = under[p]
                    under[p] = s * upper[p] + c * f
                    upper[p] = c * upper[p] - s * f
            if stopped:
                continue
            values[first] -= shift
            side[first] = g
            side[last] = 0


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def leading_eigen(matrix, rank, values, vectors):  # type: ignore[no-untyped-def]
    """The largest positive eigenvalues of a positive semidefinite matrix, at most ``rank``.

    Returns how many there are above 1e-10 of the largest; they and their eigenvectors are the
    first entries of ``values`` (k,) and rows of ``vectors`` (k, k).  ``matrix`` is overwritten.
    """
    n = values.size
    reflectors = np.empty((n, n))
    beta = np.zeros(n)
    side = np.zeros(n)
    diagonal = np.empty(n)
    if 3 * rank > n:  # all pairs by QL cost less than many inverse iterations
        symmetric_eigen(matrix, diagonal, reflectors)
        count = largest_first(diagonal, rank, values, side)
        for e in range(count):
            for p in range(n):
                vectors[e, p] = reflectors[int(side[e]), p]
        return count
    tridiagonalize(matrix, reflectors, beta, diagonal, side)
    tridiagonal_values(diagonal, side, values[:rank])
    count = 0
    while count < rank and values[count] > max(1e-10 * values[0], 0.0):
        count += 1
    tridiagonal_vectors(diagonal, side, values[:count], vectors)
    reflect_back(reflectors, beta, vectors[:count])
    return count


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def tridiagonalize(matrix, reflectors, beta, diagonal, side):  # type: ignore[no-untyped-def]
    """Reflectors as rows, ``H_j = I - beta_j v_j v_j'``, and the two diagonals of T.

    Loops run over whole rows even where the leading entries are zero: short loops of varying
    length cost more than the multiplications by zero.
    """
    n = diagonal.size
    update = np.empty(n)
    for j in range(n - 2):
        v = reflectors[j]
        norm = 0.0
        for p in range(n):
            v[p] = matrix[j, p]
        for p in range(j + 1):
            v[p] = 0.0
        for p in range(n):
            norm += v[p] * v[p]
        norm = np.sqrt(norm)
        if norm < 1e-140:  # its square would leave the range of a double
            continue
        side[j] = -norm if v[j + 1] > 0 else norm
        beta[j] = 1 / (norm * (norm + abs(v[j + 1])))
        v[j + 1] -= side[j]
        for p in range(n):
            update[p] = 0.0
        first = (j + 1) // 4 * 4
        whole = first + (n - first) // 4 * 4
        for i in range(first, whole, 4):  # four rows at once: a quarter of the stores
            a, b, c, d = v[i], v[i + 1], v[i + 2], v[i + 3]
            row_a, row_b, row_c, row_d = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
            for p in range(n):
                update[p] += a * row_a[p] + b * row_b[p] + c * row_c[p] + d * row_d[p]
        for i in range(whole, n):
            a, row_a = v[i], matrix[i]
            for p in range(n):
                update[p] += a * row_a[p]
        inner = 0.0
        for p in range(n):
            update[p] *= beta[j]
            inner += update[p] * v[p]
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
        diagonal[i] = matrix[i, i]


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def multiply_reflections(reflectors, beta, out):  # type: ignore[no-untyped-def]
    """out = H'."""
    n = beta.size
    update = np.empty(n)
    for i in range(n):
        for p in range(n):
            out[i, p] = 0.0
        out[i, i] = 1.0
    for j in range(n - 3, -1, -1):
        if beta[j] == 0:
            continue
        v = reflectors[j]
        for p in range(n):
            update[p] = 0.0
        for i in range(j + 1, n):
            share, row = beta[j] * v[i], out[i]
            for p in range(n):
                update[p] += share * row[p]
        for i in range(j + 1, n):
            share, row = v[i], out[i]
            for p in range(n):
                row[p] -= share * update[p]
    for i in range(n):
        for p in range(i):
            out[i, p], out[p, i] = out[p, i], out[i, p]


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def reflect_back(reflectors, beta, vectors):  # type: ignore[no-untyped-def]
    """Rows that are eigenvectors of T into eigenvectors of A."""
    n = beta.size
    for e in range(vectors.shape[0]):
        vector = vectors[e]
        for j in range(n - 3, -1, -1):
            if beta[j] == 0:
                continue
            v = reflectors[j]
            inner = 0.0
            for p in range(n):
                inner += v[p] * vector[p]
            inner *= beta[j]
            for p in range(n):
                vector[p] -= inner * v[p]


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def tridiagonal_values(diagonal, side, values):  # type: ignore[no-untyped-def]
    """The largest eigenvalues of T, by bisection of all their intervals at once.

    The signs of ``q_i = t_i - x - s_(i-1)^2 / q_(i-1)`` count the eigenvalues above x.
    """
    n, wanted = diagonal.size, values.size
    lanes = (wanted + 15) // 16 * 16
    cuts = lanes // wanted
    low, high, largest = diagonal[0], diagonal[0], 0.0
    for i in range(n):
        reach = (abs(side[i - 1]) if i > 0 else 0.0) + abs(side[i])
        low, high = min(low, diagonal[i] - reach), max(high, diagonal[i] + reach)
        largest = max(largest, abs(diagonal[i]) + reach)
    lows, highs = np.full(wanted, low), np.full(wanted, high)
    shifts, q, above = np.full(lanes, high), np.empty(lanes), np.empty(lanes)
    least = 1e-18 * largest
    passes = int(np.ceil(np.log(1e14) / np.log(cuts + 1.0))) if largest > 0 else 0
    for _ in range(passes):
        for e in range(wanted):
            for c in range(cuts):
                shifts[e * cuts + c] = lows[e] + (highs[e] - lows[e]) * (c + 1) / (cuts + 1)
        for m in range(lanes):
            q[m] = 1.0
            above[m] = 0.0
        for i in range(n):
            entry = diagonal[i]
            square = side[i - 1] * side[i - 1] if i > 0 else 0.0
            for m in range(lanes):
                value = (entry - shifts[m]) - square / q[m]
                value = -least if abs(value) < least else value
                q[m] = value
                above[m] += 1.0 if value > 0 else 0.0
        for e in range(wanted):
            for c in range(cuts):
                if above[e * cuts + c] <= e:
                    highs[e] = shifts[e * cuts + c]
                    break
                lows[e] = shifts[e * cuts + c]
    for e in range(wanted):
        values[e] = 0.5 * (lows[e] + highs[e])


@njit(nogil=True, cache=True, error_model="numpy")
def largest_first(every, rank, values, order):  # type: ignore[no-untyped-def]
    """The ``rank`` largest of ``every`` that are above 1e-10 of the first; returns their number."""
    n = every.size
    taken = np.zeros(n, dtype=np.bool_)
    for e in range(min(rank, n)):
        best = -1
        for j in range(n):
            if not taken[j] and (best < 0 or every[j] > every[best]):
                best = j
        taken[best] = True
        values[e], order[e] = every[best], best
        if values[e] <= 0 or values[e] <= 1e-10 * values[0]:
            return e
    return min(rank, n)


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def tridiagonal_vectors(diagonal, side, values, vectors):  # type: ignore[no-untyped-def]
    """Eigenvectors of T for some of its eigenvalues, by inverse iteration, as rows.

    Each is kept orthogonal to those before it, so that equal eigenvalues get distinct vectors.
    """
    n = diagonal.size
    pivots, second, third = np.empty(n), np.empty(n), np.empty(n)
    shares = np.empty(n)
    swapped = np.empty(n, dtype=np.bool_)
    largest = 0.0
    for i in range(n):
        largest = max(largest, abs(diagonal[i]) + abs(side[i]))
    least = SMALL * largest
    seed = 1
    for e in range(values.size):
        x = vectors[e]
        # T - value I = P L U, with the next row as pivot where that is the larger
        a = diagonal[0] - values[e]
        b = side[0]
        for i in range(n - 1):
            under = side[i]
            a_next = diagonal[i + 1] - values[e]
            b_next = side[i + 1]
            swapped[i] = abs(under) > abs(a)
            if swapped[i]:
                pivots[i], second[i], third[i] = under, a_next, b_next
                shares[i] = a / under
                a = b - shares[i] * a_next
                b = -shares[i] * b_next
            else:
                if abs(a) < least:
                    a = least
                pivots[i], second[i], third[i] = a, b, 0.0
                shares[i] = under / a
                a = a_next - shares[i] * b
                b = b_next
        pivots[n - 1] = a if abs(a) >= least else least
        second[n - 1] = third[n - 1] = 0.0
        if n > 1:
            third[n - 2] = 0.0
        for i in range(n):
            pivots[i] = 1 / pivots[i]
            seed = (1103515245 * seed + 12345) % 2147483648
            x[i] = 1.0 + seed / 2147483648  # some of every eigenvector
        for step in range(3):
            if step > 0:
                for i in range(n - 1):
                    if swapped[i]:
                        x[i], x[i + 1] = x[i + 1], x[i] - shares[i] * x[i + 1]
                    else:
                        x[i + 1] -= shares[i] * x[i]
            one = two = 0.0  # entries i + 1 and i + 2
            for i in range(n - 1, -1, -1):
                value = (x[i] - second[i] * one - third[i] * two) * pivots[i]
                x[i] = value
                one, two = value, one
            normalize(x)
            for _ in range(2 if step == 2 else 1):
                for other in range(e):
                    y = vectors[other]
                    inner = 0.0
                    for p in range(n):
                        inner += x[p] * y[p]
                    for p in range(n):
                        x[p] -= inner * y[p]
                normalize(x)


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def normalize(x):  # type: ignore[no-untyped-def]
    largest = 0.0
    for p in range(x.size):
        largest = max(largest, abs(x[p]))
    size = 0.0
    inverse = 1 / largest if largest > 0 else 0.0
    for p in range(x.size):
        x[p] *= inverse
        size += x[p] * x[p]
    inverse = 1 / np.sqrt(size) if size > 0 else 0.0
    for p in range(x.size):
        x[p] *= inverse
