"""Local and global maps against explicit float64 solutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geomstats_lm import global_fits
from geomstats_lm.class_labels import parse_classes, ridge_of
from geomstats_lm.function_classes import Neighbourhoods, kernel_weights, local_predictions
from tests import explicit

LOCAL = ["local_mean", "scalar", "diagonal", "linear", "affine"]


def neighbourhoods(n=7, k=12, d=20, many=60, offset=2.0, seed=0):
    """Queries, their neighbours and targets; the raw arrays in float64 beside them."""
    rng = np.random.default_rng(seed)
    raw = (rng.normal(size=(many, d)) + offset).astype(np.float32)
    targets = rng.normal(size=(many, d)).astype(np.float32)
    x = (rng.normal(size=(n, d)) + offset).astype(np.float32)
    centre = raw.mean(0)
    states = raw - centre
    rows = np.stack([rng.permutation(many)[:k] for _ in range(n)])
    distances = np.linalg.norm(x[:, None] - raw[rows], axis=2)
    order = np.argsort(distances, 1)
    data = Neighbourhoods(
        x - centre, np.take_along_axis(rows, order, 1),
        np.take_along_axis(distances, order, 1).astype(np.float32), states, centre, targets,
    )  # fmt: skip
    exact = (data.queries.astype(np.float64) + centre, states.astype(np.float64) + centre)
    return data, *exact, targets.astype(np.float64)


def relative(observed, expected):
    """Relative distance; absolute where the expected values are all but zero."""
    return np.linalg.norm(observed - expected) / max(np.linalg.norm(expected), 0.1)


@pytest.mark.parametrize("shape", [(12, 20), (32, 40), (9, 5), (6, 1), (1, 4), (31, 192)])
@pytest.mark.parametrize("label", LOCAL)
def test_each_local_class_is_what_its_formula_says(label, shape):
    k, d = shape
    data, x, raw, targets = neighbourhoods(k=k, d=d)
    (cls,) = parse_classes([label])
    predicted, df, _ = local_predictions([cls], data, k=k)
    formula = getattr(explicit, label)
    expected = np.stack(
        [
            formula(x[i], raw[rows], targets[rows], np.nan_to_num(ridge_of(cls)))
            for i, rows in enumerate(data.neighbours)
        ]
    )
    # float32 inputs, one Gram in float32: a few units in the seventh digit times conditioning
    assert relative(predicted[0], expected) < 1e-5
    assert np.all(np.isfinite(df)) and np.all(df >= 0) and np.all(df <= k + 1e-4)


@pytest.mark.parametrize("shape", [(12, 20), (32, 80), (9, 5), (6, 1), (2, 4), (31, 192)])
@pytest.mark.parametrize("rank", [1, 3, 8, 40])
def test_low_rank_is_reduced_rank_regression(rank, shape):
    k, d = shape
    data, x, raw, targets = neighbourhoods(k=k, d=d)
    classes = parse_classes([f"low_rank[rank={rank}]", "linear"])
    predicted, df, _ = local_predictions(classes, data, k=k)
    expected = np.stack(
        [
            explicit.low_rank(x[i], raw[rows], targets[rows], 0.01, min(rank, d))
            for i, rows in enumerate(data.neighbours)
        ]
    )
    assert relative(predicted[0], expected) < 1e-5
    assert np.all(df[0] <= df[1] + 1e-4)


@pytest.mark.parametrize("shape", [(12, 40), (32, 80), (12, 20), (9, 5), (6, 1), (31, 192)])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("target", ["update", "state"])
def test_orthogonal_is_the_polar_factor(shape, scale, target):
    k, d = shape
    data, x, raw, targets = neighbourhoods(k=k, d=d)
    if target == "state":
        targets = targets + raw
        data = data._replace(targets=targets.astype(np.float32))
    (cls,) = parse_classes(["orthogonal" if scale else "orthogonal[scale=False]"])
    predicted, df, _ = local_predictions([cls], data, k=k, target=target)
    shift = raw if target == "state" else 0
    expected = np.stack(
        [
            explicit.orthogonal(x[i], raw[rows], (targets - shift)[rows], scale, 1e-6)
            + (x[i] if target == "state" else 0)
            for i, rows in enumerate(data.neighbours)
        ]
    )
    assert relative(predicted[0], expected) < 1e-5
    assert np.all(df <= d)


def test_orthogonal_keeps_lengths_and_is_procrustes_where_that_is_defined():
    from scipy.linalg import orthogonal_procrustes

    data, x, raw, targets = neighbourhoods(k=30, d=6)
    (cls,) = parse_classes(["orthogonal[scale=False]"])
    predicted = local_predictions([cls], data, k=30)[0][0]
    assert np.allclose(np.linalg.norm(x + predicted, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    rows = data.neighbours[0]
    turn = orthogonal_procrustes(raw[rows], raw[rows] + targets[rows])[0]
    assert relative(predicted[0] + x[0], x[0] @ turn) < 1e-5


def test_orthogonal_with_duplicated_neighbours_stays_defined():
    data, x, raw, targets = neighbourhoods(k=12, d=40)
    rows = data.neighbours.copy()
    rows[:, 6:] = rows[:, :6]  # every neighbour twice
    (cls,) = parse_classes(["orthogonal"])
    predicted = local_predictions([cls], data._replace(neighbours=rows), k=12)[0][0]
    single = np.stack(
        [
            explicit.orthogonal(x[i], raw[r], targets[r], True, 1e-6)
            for i, r in enumerate(rows[:, :6])
        ]
    )
    assert relative(predicted, single) < 1e-5


ALL_LOCAL = [
    *LOCAL, "low_rank[rank=3]", "orthogonal", "orthogonal[scale=False]", "affine[ridge=0.1]",
    "affine[weights=gaussian]", "linear[k=5]", "affine[scope=global+local]",
]  # fmt: skip


@pytest.mark.parametrize("shape", [(12, 40), (32, 192), (9, 5), (6, 1)])
@pytest.mark.parametrize("target", ["update", "state"])
def test_both_implementations_agree(shape, target):
    k, d = shape
    data, *_ = neighbourhoods(k=k, d=d)
    classes = parse_classes(ALL_LOCAL)
    one, one_df, one_rest = local_predictions(classes, data, k=k, target=target)
    two, two_df, two_rest = local_predictions(classes, data, k=k, target=target, device="cpu:0")
    for c, cls in enumerate(classes):
        assert relative(one[c], two[c]) < 1e-5, cls.label
        assert np.allclose(one_df[c], two_df[c], rtol=1e-4, atol=1e-4), cls.label
    assert one_rest.keys() == two_rest.keys() == {"affine[scope=global+local]"}
    for label, rebuilt in one_rest.items():
        assert relative(rebuilt, two_rest[label]) < 1e-5


@pytest.mark.parametrize("shape", [(12, 40), (9, 5)])
def test_both_implementations_agree_on_duplicates(shape):
    k, d = shape
    data, *_ = neighbourhoods(k=k, d=d)
    rows = data.neighbours.copy()
    rows[:, k // 2 :] = rows[:, : k - k // 2]
    data = data._replace(neighbours=rows)
    classes = parse_classes(ALL_LOCAL)
    one, _, _ = local_predictions(classes, data, k=k)
    two, _, _ = local_predictions(classes, data, k=k, device="cpu:0")
    for c, cls in enumerate(classes):
        assert relative(one[c], two[c]) < 1e-4, cls.label


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_accelerator_agrees_with_the_compiled_kernels():
    data, *_ = neighbourhoods(k=32, d=192)
    classes = parse_classes(ALL_LOCAL)
    one = local_predictions(classes, data, k=32)[0]
    two = local_predictions(classes, data, k=32, device="cuda")[0]
    for c, cls in enumerate(classes):
        assert relative(one[c], two[c]) < 1e-4, cls.label  # other order of float32 sums


@pytest.mark.parametrize("distinct", [1, 2, 5])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_few_distinct_neighbours_stay_exact(distinct, constant, size):
    data, x, raw, targets = neighbourhoods(k=32, d=64, many=80)
    rows = np.repeat(data.neighbours[:, :distinct], -(-32 // distinct), axis=1)[:, :32]
    if constant:
        targets = np.ones_like(targets)
    targets = (size * targets).astype(np.float32)
    labels = ["low_rank[rank=3]", "low_rank[rank=16]", "linear", "affine", "orthogonal"]
    repeated = data._replace(neighbours=np.ascontiguousarray(rows), targets=targets)
    predicted, df, _ = local_predictions(parse_classes(labels), repeated, k=32)
    assert np.isfinite(predicted).all() and np.isfinite(df).all()
    exact = targets.astype(np.float64)
    for c, (rank, ridge) in enumerate([(3, 0.01), (16, 0.01)]):
        expected = np.stack(
            [explicit.low_rank(x[i], raw[r], exact[r], ridge, rank) for i, r in enumerate(rows)]
        )
        assert relative(predicted[c] / size, expected / size) < 1e-4


def test_a_far_offset_costs_an_affine_map_nothing():
    data, x, raw, targets = neighbourhoods()
    (cls,) = parse_classes(["affine[ridge=0.5]"])
    far = raw.copy()
    far[:, 0] += 3000
    centre = far.mean(0).astype(np.float32)
    states = (far - centre).astype(np.float32)
    query = x.copy()
    query[:, 0] += 3000
    moved = data._replace(states=states, centre=centre, queries=(query - centre).astype(np.float32))
    predicted = local_predictions([cls], moved, k=12)[0][0]
    exact = states.astype(np.float64) + centre.astype(np.float64)
    expected = np.stack(
        [
            explicit.affine(moved.queries[i].astype(np.float64) + centre, exact[r], targets[r], 0.5)
            for i, r in enumerate(data.neighbours)
        ]
    )
    assert relative(predicted, expected) < 1e-5


@pytest.mark.parametrize("weighting", ["tricube", "epanechnikov", "gaussian"])
def test_kernel_weights_make_a_weighted_affine_map(weighting):
    data, x, raw, targets = neighbourhoods()
    classes = parse_classes(
        [f"affine[weights={weighting}]", "affine", f"local_mean[weights={weighting}]"]
    )
    predicted = local_predictions(classes, data, k=12)[0]
    weights = kernel_weights(data.distances, weighting)
    assert np.allclose(weights.sum(1), 1) and np.all(np.diff(weights, axis=1) <= 1e-7)
    expected = np.stack(
        [
            explicit.affine(x[i], raw[r], targets[r], 1.0, weights[i])
            for i, r in enumerate(data.neighbours)
        ]
    )
    assert relative(predicted[0], expected) < 1e-5
    assert relative(predicted[1], expected) > 1e-2
    means = np.einsum("nk,nkd->nd", weights, targets[data.neighbours])
    assert relative(predicted[2], means) < 1e-5


def test_classes_fitted_together_are_the_classes_fitted_alone():
    data, *_ = neighbourhoods()
    labels = [
        *LOCAL, "affine[ridge=0.1]", "linear[k=5]", "affine[k=5,weights=gaussian]", "low_rank",
        "low_rank[rank=2]", "orthogonal", "orthogonal[scale=False]",
    ]  # fmt: skip
    classes = parse_classes(labels)
    together, df, _ = local_predictions(classes, data, k=12)
    for c, cls in enumerate(classes):
        alone, alone_df, _ = local_predictions([cls], data, k=12)
        assert np.array_equal(together[c], alone[0]), cls.label
        assert np.array_equal(df[c], alone_df[0])


def test_effective_df_is_the_trace_of_the_smoother():
    data, _, raw, _ = neighbourhoods()
    classes = parse_classes(["linear[ridge=0.3]", "affine[ridge=0.3]"])
    df = local_predictions(classes, data, k=12)[1]
    for i, rows in enumerate(data.neighbours):
        X = raw[rows]
        for c, Z in enumerate([X, X - X.mean(0)]):
            K = Z @ Z.T
            hat = K @ np.linalg.inv(K + explicit.penalty(Z, 0.3, X.mean(0)) * np.eye(len(K)))
            assert df[c, i] == pytest.approx(np.trace(hat) + c, rel=1e-4)


def test_degenerate_neighbourhoods_stay_finite():
    for state, target in [(0.0, 0.0), (0.0, 1.0), (2.0, 1.0)]:
        n, k, d = 3, 8, 4
        states = np.zeros((20, d), dtype=np.float32)
        data = Neighbourhoods(
            np.zeros((n, d), np.float32), np.tile(np.arange(k), (n, 1)),
            np.zeros((n, k), np.float32), states, np.full(d, state, np.float32),
            np.full((20, d), target, np.float32),
        )  # fmt: skip
        labels = [
            *LOCAL,
            "low_rank[rank=3]",
            "orthogonal",
            "linear[ridge=0]",
            "affine[ridge=0]",
            "affine[weights=tricube]",
        ]
        predicted, df, _ = local_predictions(parse_classes(labels), data, k=k)
        assert np.isfinite(predicted).all() and np.isfinite(df).all()
        # every affine-like class predicts the one update that all duplicates had
        for c, label in enumerate(labels):
            if label.startswith(("affine", "local_mean", "diagonal")):
                assert np.allclose(predicted[c], target, atol=1e-5), label


def test_exact_interpolation_without_ridge():
    data, x, raw, _ = neighbourhoods(k=30, d=4)
    slope = np.random.default_rng(5).normal(size=(4, 4))
    targets = (raw @ slope + 1).astype(np.float32)
    predicted = local_predictions(
        parse_classes(["affine[ridge=0]"]), data._replace(targets=targets), k=30
    )[0]
    # the floor of lambda, 1e-6 |mean|^2 against 30 observations, biases by about 1e-6
    assert relative(predicted[0], x @ slope + 1) < 1e-4


@pytest.mark.parametrize("n", [300, 8])
@pytest.mark.parametrize(
    "name", ["low_rank", "orthogonal", "scalar", "diagonal", "linear", "affine", "mean"]
)
def test_each_global_class_is_what_its_formula_says(name, n):
    rng = np.random.default_rng(1)
    d = 11
    raw = (rng.normal(size=(n, d)) * np.geomspace(1, 30, d) + 5).astype(np.float32)
    targets = (raw @ rng.normal(size=(d, d)) + rng.normal(size=(n, d)) + 1).astype(np.float32)
    centre = raw.mean(0)
    states = raw - centre
    exact = states.astype(np.float64) + centre
    sums = global_fits.moments(states, targets, centre, crossed=True, turned=True)
    fitted = global_fits.fit(name, sums, ridge=0.02, rank=3)
    predicted = global_fits.predict(fitted, states[:5])
    formula = explicit.local_mean if name == "mean" else getattr(explicit, name)
    last = {"low_rank": (0.02, 3), "orthogonal": (True, 1e-9 * np.sum(exact**2) / d)}
    arguments = last.get(name, (0.02,))
    expected = np.stack([formula(x, exact, targets.astype(float), *arguments) for x in exact[:5]])
    assert relative(predicted, expected) < 1e-5


def test_token_means_are_means_by_token_and_fall_back_to_the_mean():
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 3000, 5000)
    targets = rng.normal(size=(5000, 3)).astype(np.float32)
    states = np.zeros((5000, 3), np.float32)
    sums = global_fits.moments(states, targets, np.zeros(3), crossed=False, token_ids=tokens)
    fitted = global_fits.fit("token_mean", sums)
    seen = tokens[:40]
    expected = np.stack([targets[tokens == t].mean(0) for t in seen])
    assert np.allclose(global_fits.predict(fitted, states[:40], seen), expected, atol=1e-6)
    unseen = global_fits.predict(fitted, states[:1], np.array([99999]))
    assert np.allclose(unseen, targets.mean(0), atol=1e-6)


def test_moments_without_a_part_are_those_of_the_rest():
    rng = np.random.default_rng(3)
    states, targets = rng.normal(size=(2, 100, 4)).astype(np.float32)
    tokens = rng.integers(0, 30, 100)
    kept = np.arange(100) >= 25
    arguments = {"centre": np.ones(4), "crossed": True}
    whole = global_fits.moments(states, targets, token_ids=tokens, **arguments)
    part = global_fits.moments(states[~kept], targets[~kept], token_ids=tokens[~kept], **arguments)
    rest = global_fits.moments(states[kept], targets[kept], token_ids=tokens[kept], **arguments)
    left = global_fits.subtract(whole, part)
    for name, value in vars(rest).items():
        if value is None:
            assert getattr(left, name) is None
            continue
        assert np.allclose(getattr(left, name), value, atol=1e-10), name
