"""A streamed subspace is the SVD's, in little memory; angles and energies are those planted."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import subspace_angles

from geomstats_lm.geometry_measures import energy_measures
from geomstats_lm.subspaces import (
    overlap,
    principal_angles,
    spectrum_measures,
    streamed_subspace,
)


def decaying(n: int, dim: int, *, seed: int = 0, mean: float = 0.0) -> np.ndarray:
    """Rows whose singular values fall by a power, as those of states do."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    rows = rng.standard_normal((n, dim)) * np.arange(1, dim + 1) ** -0.7 @ turn
    return rows + mean * turn[dim // 2]


def in_blocks(rows: np.ndarray, sizes: list[int]):
    edges = np.cumsum([0, *sizes])
    return lambda: (rows[a:b] for a, b in zip(edges, [*edges[1:], len(rows)]) if b > a)


def projector(basis: np.ndarray) -> np.ndarray:
    return basis.T @ basis


@settings(max_examples=25, deadline=None)
@given(
    dim=st.sampled_from([3, 16, 60]),
    m=st.integers(1, 6),
    centred=st.booleans(),
    method=st.sampled_from(["gram", "sketch"]),
    sizes=st.lists(st.integers(1, 90), max_size=5),
)
def test_streamed_subspace_is_that_of_the_stacked_matrix(dim, m, centred, method, sizes) -> None:
    rows = decaying(400, dim, mean=3.0)
    found = streamed_subspace(in_blocks(rows, sizes), m, centred=centred, method=method)
    stacked = rows - rows.mean(axis=0) if centred else rows
    _, values, vectors = np.linalg.svd(stacked, full_matrices=False)
    m = min(m, dim)
    assert found.components == m
    # 1e-5 as promised; a tie between the m-th and the next value would leave the cut undefined
    np.testing.assert_allclose(projector(found.basis), projector(vectors[:m]), atol=1e-5)
    np.testing.assert_allclose(found.singular_values, values[:m], rtol=1e-5)
    assert found.energy_share == pytest.approx((values[:m] ** 2).sum() / (values**2).sum())


def test_sketch_holds_m_times_d_numbers() -> None:
    rng = np.random.default_rng(0)
    n, dim, m, block = 300, 3000, 4, 25
    left, right = rng.standard_normal((n, 6)), rng.standard_normal((6, dim))
    scale = np.array([32, 16, 8, 4, 2, 1])
    rows = ((left * scale) @ right).astype(np.float32)  # is there before memory is counted
    tracemalloc.start()
    found = streamed_subspace(in_blocks(rows, [block] * (n // block)), m, method="sketch")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = 8 * dim * (m + 16)  # a sketch; the copies of one step and of one block come on top
    assert peak < 10 * held + 4 * 8 * dim * block < 8 * dim * dim / 4
    vectors = np.linalg.svd(rows.astype(float), full_matrices=False)[2]
    assert overlap(found.basis, vectors[:m]) == pytest.approx(1, abs=1e-8)


def test_an_energy_share_takes_the_fewest_dimensions_that_hold_it() -> None:
    rows = np.diag([4.0, 3.0, 2.0, 1.0])  # energies 16, 9, 4, 1 of 30
    for share, expected in ((0.5, 1), (0.55, 2), (25 / 30, 2), (0.9, 3), (0.99, 4)):
        found = streamed_subspace(lambda: [rows], share)
        assert found.components == expected, share
        assert found.energy_share >= share
    assert streamed_subspace(lambda: [rows], 0.99, most=2).components == 2


def test_a_constant_has_one_dimension_and_zeros_have_none() -> None:
    constant = np.tile(np.arange(1.0, 6.0), (50, 1)).astype(np.float32)
    for method in ("gram", "sketch"):
        found = streamed_subspace(lambda: [constant], 4, method=method)
        assert found.components == 1 and found.energy_share == pytest.approx(1)
        assert found.effective_rank == pytest.approx(1, abs=1e-6)
    assert streamed_subspace(lambda: [constant], 4, centred=True).components == 0
    zeros = streamed_subspace(lambda: [0 * constant], 4)
    assert zeros.components == 0 and np.isnan(zeros.energy_share)


def test_effective_rank_and_participation_ratio_of_known_spectra() -> None:
    assert spectrum_measures(np.ones(7), 0.0, 0) == pytest.approx((7, 7))
    # 1/2, 1/4, 1/4: entropy 1.5 log 2; 1 / (1/4 + 1/16 + 1/16)
    assert spectrum_measures(np.array([2.0, 1, 1]), 0.0, 0) == pytest.approx((2**1.5, 8 / 3))
    assert spectrum_measures(np.ones(3), 4.0, 4) == pytest.approx((7, 7))


@settings(max_examples=25, deadline=None)
@given(dim=st.integers(4, 40), a=st.integers(1, 4), b=st.integers(1, 4), seed=st.integers(0, 99))
def test_principal_angles_are_scipys(dim, a, b, seed) -> None:
    rng = np.random.default_rng(seed)
    first = np.linalg.qr(rng.standard_normal((dim, a)))[0].T
    second = np.linalg.qr(rng.standard_normal((dim, b)))[0].T
    expected = np.sort(np.degrees(subspace_angles(first.T, second.T)))
    padded = np.concatenate([second, np.zeros((2, dim))])
    found = principal_angles(first, padded)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    squares = np.cos(np.radians(expected)) ** 2
    assert overlap(first, second) == pytest.approx(squares.mean(), abs=1e-9)


@pytest.mark.parametrize("dim", [16, 128, 768])
def test_planted_energies_come_back_and_a_random_vector_has_m_over_d(dim) -> None:
    rng = np.random.default_rng(dim)
    n, m = 3000, 4
    turn = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    basis, rest = turn[:m], turn[m:]

    def planted(share: float) -> np.ndarray:
        inside, outside = rng.standard_normal((n, m)), rng.standard_normal((n, dim - m))
        inside *= np.sqrt(share) / np.linalg.norm(inside, axis=1, keepdims=True)
        outside *= np.sqrt(1 - share) / np.linalg.norm(outside, axis=1, keepdims=True)
        return rng.uniform(0.1, 9, (n, 1)) * (inside @ basis + outside @ rest)

    tokenwise, residual = planted(0.9), planted(0.2)
    none = np.zeros(dim)
    found = energy_measures(tokenwise, tokenwise + residual, basis[None], none, none)
    np.testing.assert_allclose(found[:, 1], 0.9, atol=1e-6)
    np.testing.assert_allclose(found[:, 2], 0.2, atol=1e-5)
    noise = rng.standard_normal((n, dim))
    energy = energy_measures(tokenwise, tokenwise + noise, basis[None], none, none)[:, 2]
    # Beta(m/2, (d-m)/2): four standard errors of the mean
    error = stats.beta(m / 2, (dim - m) / 2).std() / np.sqrt(n)
    assert energy.mean() == pytest.approx(m / dim, abs=4 * error)


def test_bad_arguments_are_named() -> None:
    rows = np.eye(3)
    for m in (0, 1.5, True, -0.1):
        with pytest.raises(ValueError, match=r"m=.*accepted"):
            streamed_subspace(lambda: [rows], m)
    with pytest.raises(ValueError, match="method='qr'"):
        streamed_subspace(lambda: [rows], 1, method="qr")
    with pytest.raises(ValueError, match="no rows"):
        streamed_subspace(lambda: [], 1)
