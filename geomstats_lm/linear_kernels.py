"""Which small dense operations does a fit of one token need, all within the cache?

Gram matrices ``X X'`` of k rows in tiles that fit the registers, and ``K = L L'`` for positive
semidefinite K, with ``L^-1`` and a solution of ``L y = b`` on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

FAST = {"nsz", "nnan", "ninf", "reassoc", "contract", "arcp"}
LINE = 16  # float32 values in a line of the cache


@intrinsic
def prefetch(typing_context: Any, array: Any, row: Any, column: Any) -> Any:  # pragma: no cover
    """Ask for the cache line of ``array[row, column]`` before it is needed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, arguments[0])
        width = builder.extract_value(source.shape, 1)
        entry = builder.add(builder.mul(arguments[1], width), arguments[2])
        pointer = builder.gep(source.data, [entry])
        pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        integer = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, integer, integer, integer])
        call = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        # to read, into the second-level cache, as data
        builder.call(call, [pointer, integer(0), integer(2), integer(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


@njit(nogil=True, cache=True)
def prefetch_row(array, row):  # type: ignore[no-untyped-def]
    for p in range(0, array.shape[1], LINE):
        prefetch(array, row, p)  # type: ignore[call-arg]  # numba passes the typing context


@njit(nogil=True, cache=True, fastmath=FAST)
def half_gram(X, gram, next_array, next_rows, other_array, other_rows):  # type: ignore[no-untyped-def]
    """X X' on and above the diagonal, by 4 x 2 tiles: eight sums and six rows in registers.

    Every tile also asks for one of ``next_rows`` of ``next_array``, then of the others, so that
    memory works while the arithmetic does.
    """
    rows, d = X.shape
    tile = 0
    for i in range(0, rows, 4):
        a0, a1, a2, a3 = X[i], X[i + 1], X[i + 2], X[i + 3]
        for j in range(0, i + 4, 2):
            if tile < next_rows.size:
                prefetch_row(next_array, next_rows[tile])
            elif tile - next_rows.size < other_rows.size:
                prefetch_row(other_array, other_rows[tile - next_rows.size])
            tile += 1
            b0, b1 = X[j], X[j + 1]
            s00 = s01 = s10 = s11 = np.float32(0)
            s20 = s21 = s30 = s31 = np.float32(0)
            for p in range(d):
                x0, x1, x2, x3 = a0[p], a1[p], a2[p], a3[p]
                y0, y1 = b0[p], b1[p]
                s00 += x0 * y0
                s01 += x0 * y1
                s10 += x1 * y0
                s11 += x1 * y1
                s20 += x2 * y0
                s21 += x2 * y1
                s30 += x3 * y0
                s31 += x3 * y1
            above, next_above = gram[j], gram[j + 1]
            above[i], above[i + 1], above[i + 2], above[i + 3] = s00, s10, s20, s30
            next_above[i], next_above[i + 1] = s01, s11
            next_above[i + 2], next_above[i + 3] = s21, s31


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


@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def eliminate(matrix, vector, tolerance):  # type: ignore[no-untyped-def]
    """Factorize K = L L' in place, with L^-1 b and the trace of (L L')^-1 = ||L^-1||^2.

    Parameters
    ----------
    matrix : (k, k) float64, k a multiple of 4
        K, of which the upper half counts.  Then L' above the diagonal and L^-1 on and below it.
    vector : (k,) float64
        b, then L^-1 b.
    tolerance : float
        A pivot under tolerance x diagonal drops its row and column: L^-1 has zeros there, which
        makes every solve that of the rows that are kept.  Rows of zeros are dropped so, too.
    """
    k = vector.size
    least = np.empty(k)
    for j in range(k):
        least[j] = max(tolerance * matrix[j, j], 0.0)
    for first in range(0, k, 4):
        # Rows that are done hold L^-1 left of the diagonal and L' right of it, so that one
        # operation on whole rows updates both.
        for j in range(first, first + 4):
            row = matrix[j]
            pivot = row[j]
            inverse = 1 / np.sqrt(pivot) if pivot > least[j] else 0.0
            row[j] = 1.0
            for p in range(k):
                row[p] *= inverse
            vector[j] *= inverse
            for i in range(j + 1, first + 4):
                below = matrix[i]
                share = row[i]
                below[j] = 0.0
                for p in range(k):
                    below[p] -= share * row[p]
                vector[i] -= share * vector[j]
        row_a, row_b = matrix[first], matrix[first + 1]
        row_c, row_d = matrix[first + 2], matrix[first + 3]
        y_a, y_b, y_c, y_d = vector[first], vector[first + 1], vector[first + 2], vector[first + 3]
        # L' among the four themselves is no part of what they do to the rows below
        ab, ac, ad = row_a[first + 1], row_a[first + 2], row_a[first + 3]
        bc, bd, cd = row_b[first + 2], row_b[first + 3], row_c[first + 3]
        row_a[first + 1] = row_a[first + 2] = row_a[first + 3] = 0.0
        row_b[first + 2] = row_b[first + 3] = row_c[first + 3] = 0.0
        for i in range(first + 4, k):
            below = matrix[i]
            a, b, c, d = row_a[i], row_b[i], row_c[i], row_d[i]
            for p in range(first, first + 4):
                below[p] = 0.0
            for p in range(k):
                below[p] -= a * row_a[p] + b * row_b[p] + c * row_c[p] + d * row_d[p]
            vector[i] -= a * y_a + b * y_b + c * y_c + d * y_d
        row_a[first + 1], row_a[first + 2], row_a[first + 3] = ab, ac, ad
        row_b[first + 2], row_b[first + 3], row_c[first + 3] = bc, bd, cd


@njit(nogil=True, cache=True, fastmath=FAST)
def apply_transposed_inverse(factor, vector, out):  # type: ignore[no-untyped-def]
    """out = L^-T v; returns ||L^-1||^2."""
    k = vector.size
    total = 0.0
    for p in range(k):
        out[p] = 0.0
    for j in range(k):
        row, share = factor[j], vector[j]
        for p in range(j + 1):
            out[p] += share * row[p]
            total += row[p] * row[p]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def split_factor(factor, inverse, transposed):  # type: ignore[no-untyped-def]
    """L^-1 and L' as matrices of their own, with zeros where they have none."""
    k = factor.shape[0]
    for i in range(k):
        for p in range(k):
            inverse[i, p] = factor[i, p] if p <= i else 0.0
            transposed[i, p] = factor[i, p] if p > i else 0.0
        if factor[i, i] > 0:
            transposed[i, i] = 1 / factor[i, i]


@njit(nogil=True, cache=True)
def transpose(matrix, out):  # type: ignore[no-untyped-def]
    for i in range(matrix.shape[0]):
        for p in range(matrix.shape[0]):
            out[p, i] = matrix[i, p]


@njit(nogil=True, cache=True, fastmath=FAST)
def multiply_transposed(a, b, out):  # type: ignore[no-untyped-def]
    """out = a b' for square matrices of a size that is a multiple of 4."""
    k = out.shape[0]
    for i in range(0, k, 4):
        a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
        for j in range(0, k, 2):
            b0, b1 = b[j], b[j + 1]
            s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = 0.0
            for p in range(k):
                x0, x1, x2, x3 = a0[p], a1[p], a2[p], a3[p]
                y0, y1 = b0[p], b1[p]
                s00 += x0 * y0
                s01 += x0 * y1
                s10 += x1 * y0
                s11 += x1 * y1
                s20 += x2 * y0
                s21 += x2 * y1
                s30 += x3 * y0
                s31 += x3 * y1
            out[i, j], out[i, j + 1] = s00, s01
            out[i + 1, j], out[i + 1, j + 1] = s10, s11
            out[i + 2, j], out[i + 2, j + 1] = s20, s21
            out[i + 3, j], out[i + 3, j + 1] = s30, s31


@njit(nogil=True, cache=True)
def positive_pivots(factor):  # type: ignore[no-untyped-def]
    count = 0
    for j in range(factor.shape[0]):
        count += factor[j, j] > 0
    return count
