"""The small dense operations of a fit against numpy's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from geomstats_lm.eigen_kernels import leading_eigen, symmetric_eigen
from geomstats_lm.linear_kernels import (
    apply_transposed_inverse,
    eliminate,
    multiply_transposed,
    split_factor,
)


def turned(values):
    n = len(values)
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]
    matrix = (basis * values) @ basis.T
    return (matrix + matrix.T) / 2


MATRICES = {
    "random": turned(np.random.default_rng(1).exponential(size=32)),
    "ties": turned(np.repeat([2.0, 1.0, 0.0], [8, 8, 16])),
    "ties on the diagonal": np.diag(np.repeat([2.0, 1.0, 0.0], [8, 8, 16])),
    "all but tied": turned(1 + 1e-13 * np.arange(32)),
    "graded": turned(10.0 ** -np.arange(32)),
    "of rank three": turned(np.r_[3.0, 2.0, 1.0, np.zeros(29)]),
    "tiny": 1e-48 * turned(np.arange(1.0, 33)),
    "identity": np.eye(32),
    "of ones": np.ones((32, 32)),
    "zero": np.zeros((32, 32)),
    "one by one": np.full((1, 1), 3.0),
    "two by two": np.array([[2.0, 1.0], [1.0, 2.0]]),
}


@pytest.mark.parametrize("name", MATRICES)
def test_eigenpairs_are_those_of_numpy(name):
    matrix = MATRICES[name]
    n = len(matrix)
    exact = np.linalg.eigvalsh(matrix)[::-1]
    scale = max(exact[0], 1e-300)
    values, vectors = np.empty(n), np.empty((n, n))
    symmetric_eigen(matrix.copy(), values, vectors)
    assert np.abs(np.sort(values)[::-1] - exact).max() < 1e-13 * scale
    assert np.abs(vectors @ vectors.T - np.eye(n)).max() < 1e-13
    assert np.abs((vectors.T * values) @ vectors - matrix).max() <= 1e-13 * scale
    for rank in {1, min(4, n), min(10, n), n}:
        count = leading_eigen(matrix.copy(), rank, values, vectors)
        assert count == min(rank, np.sum(exact > 1e-10 * scale))
        found = vectors[:count]
        assert np.abs(values[:count] - exact[:count]).max(initial=0) < 1e-13 * scale
        assert np.abs(found @ found.T - np.eye(count)).max(initial=0) < 1e-13
        wrong = matrix @ found.T - found.T * values[:count]
        assert np.abs(wrong).max(initial=0) < 1e-13 * scale


@pytest.mark.parametrize("k", [4, 12, 32])
def test_one_elimination_gives_factor_inverse_and_solution(k):
    rng = np.random.default_rng(k)
    X = rng.normal(size=(k, k + 3))
    matrix = X @ X.T
    right = rng.normal(size=k)
    factor, vector, solution = matrix.copy(), right.copy(), np.empty(k)
    eliminate(factor, vector, 1e-13)
    trace = apply_transposed_inverse(factor, vector, solution)
    inverse, transposed = np.empty((k, k)), np.empty((k, k))
    split_factor(factor, inverse, transposed)
    lower = np.linalg.cholesky(matrix)
    assert np.allclose(transposed.T, lower) and np.allclose(inverse, np.linalg.inv(lower))
    assert np.allclose(solution, np.linalg.solve(matrix, right))
    assert trace == pytest.approx(np.trace(np.linalg.inv(matrix)))
    product = np.empty((k, k))
    multiply_transposed(inverse, transposed, product)
    assert np.allclose(product, inverse @ transposed.T)


def test_a_row_that_depends_on_others_is_dropped_from_every_solve():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(8, 20))
    X[5] = X[2]
    X[7] = 0
    kept = [0, 1, 2, 3, 4, 6]
    matrix, right = X @ X.T, rng.normal(size=8)
    factor, vector, solution = matrix.copy(), right.copy(), np.empty(8)
    eliminate(factor, vector, 1e-13)
    apply_transposed_inverse(factor, vector, solution)
    assert solution[5] == solution[7] == 0
    assert np.allclose(solution[kept], np.linalg.solve(matrix[np.ix_(kept, kept)], right[kept]))
