"""Nearest references against brute force in float64."""

from __future__ import annotations

import numpy as np
import pytest

from geomstats_lm import neighbours
from geomstats_lm.neighbours import nearest, search_space, to_search_space


def brute_force(queries, references, k, own, other):
    """Full float64 distance table, ties in order of row."""
    q, r = queries.astype(np.float64), references.astype(np.float64)
    table = np.linalg.norm(q[:, None] - r[None], axis=2)
    table[np.asarray(own)[:, None] == np.asarray(other)[None]] = np.inf
    order = np.argsort(table, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(table, order, 1)


@pytest.mark.parametrize("device", ["cpu", "torch"])
@pytest.mark.parametrize("shape", [(300, 2500, 17), (5, 40, 1), (257, 1025, 8), (1, 33, 64)])
def test_neighbours_are_those_of_brute_force(shape, device, monkeypatch):
    n, many, d = shape
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(n, d)).astype(np.float32)
    references = rng.normal(size=(many, d)).astype(np.float32)
    own, other = rng.integers(0, 9, n), rng.integers(0, 9, many)
    device = "cpu" if device == "cpu" else "cpu:0"  # any other name than "cpu" is torch's
    rows, distances = nearest(
        queries, references, 20, query_groups=own, reference_groups=other, device=device
    )
    expected, exact = brute_force(queries, references, 20, own, other)
    # float32 rounding can swap two neighbours only where their distances agree to 1e-6
    assert np.allclose(distances, exact, rtol=2e-6, atol=1e-6)
    assert np.mean(rows == expected) > 0.999
    assert not np.any(own[:, None] == other[rows])


def test_exact_duplicates_are_taken_in_order_of_row_and_excluded_by_group_only():
    references = np.zeros((5000, 3), dtype=np.float32)
    groups = np.arange(5000)
    rows, distances = nearest(
        references[:2], references, 32, query_groups=[0, 7], reference_groups=groups
    )
    assert rows[0].tolist() == list(range(1, 33))
    assert rows[1].tolist() == [i for i in range(33) if i != 7]
    assert np.all(distances == 0)


def test_a_huge_offset_costs_nothing_once_centred():
    rng = np.random.default_rng(1)
    references = rng.normal(size=(400, 6))
    queries = rng.normal(size=(50, 6))
    plain = nearest(queries.astype(np.float32), references.astype(np.float32), 10)[0]
    references[:, 0] += 3000
    queries[:, 0] += 3000
    centre = references.mean(0)
    moved = nearest((queries - centre), (references - centre), 10)[0]
    assert np.array_equal(plain, moved)


def test_which_others_are_searched_with_a_query_does_not_matter():
    rng = np.random.default_rng(2)
    queries = rng.normal(size=(700, 24)).astype(np.float32)
    references = rng.normal(size=(3000, 24)).astype(np.float32)
    rows, distances = nearest(queries, references, 12)
    pieces = [nearest(queries[i : i + 33], references, 12) for i in range(0, 700, 33)]
    assert np.array_equal(rows, np.concatenate([p[0] for p in pieces]))
    assert np.array_equal(distances, np.concatenate([p[1] for p in pieces]))


def test_too_few_references_outside_the_group_is_an_error():
    points = np.ones((10, 2), dtype=np.float32)
    with pytest.raises(ValueError, match="k=8: query 0 has 5 reference tokens outside"):
        nearest(points, points, 8, query_groups=[0] * 10, reference_groups=[0] * 5 + [1] * 5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": 0}, "at least 1"),
        ({"query_groups": [1]}, "go together"),
        ({"query_groups": [1], "reference_groups": [1]}, "reference_groups has shape"),
        ({"queries": np.ones((1, 3))}, "must be"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"queries": np.ones((1, 2)), "references": np.ones((4, 2)), "k": 1, **change}
    queries, references, k = (arguments.pop(a) for a in ("queries", "references", "k"))
    with pytest.raises(ValueError, match=message):
        nearest(queries, references, k, **arguments)


def test_metrics_are_euclidean_distances_in_their_own_space():
    rng = np.random.default_rng(3)
    states = (rng.normal(size=(200, 5)) * [1, 10, 100, 1, 0]).astype(np.float32)
    states -= states.mean(0)
    scaled = to_search_space(search_space("standardized", states), states)
    assert np.allclose(scaled[:, :4].std(0), 1, rtol=1e-5)
    assert np.all(scaled[:, 4] == 0)
    turned = to_search_space(search_space("cosine", states), states)
    cosine = (states[0] @ states[1]) / np.linalg.norm(states[0]) / np.linalg.norm(states[1])
    assert np.sum((turned[0] - turned[1]) ** 2) == pytest.approx(2 - 2 * cosine, rel=1e-5)
    with pytest.raises(ValueError, match="metric='manhattan'"):
        search_space("manhattan", states)


def test_a_zero_state_has_no_direction_and_does_no_harm():
    states = np.array([[0.0, 0.0], [1.0, 0.0]], dtype=np.float32)
    assert np.all(to_search_space(search_space("cosine", states), states)[0] == 0)


def test_threads_of_the_math_library_are_given_back():
    import torch

    before = torch.get_num_threads()
    with pytest.raises(KeyError), neighbours.one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
