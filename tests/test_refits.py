"""Refitted nulls: nothing left to learn is not learnt, and a leak explains what it should not."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from geomstats_lm import decompose, extract, geometry
from geomstats_lm.geometry_summary import geometry_summary
from geomstats_lm.models import untrained_model
from geomstats_lm.refits import (
    exchanges,
    leak,
    permuted,
    random_neighbours,
    random_rows,
    untrained,
)
from tests.model_samples import random_windows, tiny_gpt2
from tests.synthetic import activations

CLASSES = ["mean", "local_mean", "affine", "affine[scope=global]"]


@pytest.fixture(scope="module")
def node() -> xr.DataTree:
    states = activations(dim=8, documents=16, noise=0.3)
    parts = decompose(states, CLASSES, k=12).compute()
    return xr.DataTree.from_dict({"activations": states, "decomposition": parts})


def explained(found: xr.Dataset, label: str) -> float:
    return float(found.explained.sel(function_class=label).mean())


def test_permuted_updates_cannot_be_learnt_beyond_their_mean(node) -> None:
    observed = geometry(node)
    null = permuted(node, draws=2).compute()
    assert null.relative_error.dims == (
        "null", "model", "function_class", "draw", "layer", "token"
    )  # fmt: skip
    assert explained(observed, "affine[scope=global]") > 0.8
    # of exchanged updates the mean is all there is to know; a fit of d parameters each does worse
    beyond = null.r2_centred.sel(function_class="affine[scope=global]")
    assert float(beyond.max()) < 0.1
    norms = observed.update_norm.values[0, 0], null.update_norm.isel(null=0, draw=0).values[0, 0]
    np.testing.assert_allclose(*(np.sort(v[np.isfinite(v)]) for v in norms), rtol=1e-5)


def test_exchanges_are_permutations_within_groups(node) -> None:
    data = node["activations"].to_dataset()
    order = exchanges(data, "token_id", np.random.default_rng(0))
    assert (np.sort(order) == np.arange(len(order))).all()
    for label in ("token_id", "split"):
        assert (data[label].values[order] == data[label].values).all()
    first = data.position.values == 0
    assert (order[first] == np.flatnonzero(first)).all()
    assert (order != np.arange(len(order))).mean() > 0.7


def test_random_neighbours_lose_what_is_local_and_a_leak_gains_what_is_not(node) -> None:
    observed = geometry(node)
    far = random_neighbours(node, draws=2).compute()
    near = leak(node).compute()
    assert list(far.function_class.values) == ["local_mean", "affine"]
    for label in ("local_mean", "affine"):
        honest = explained(observed, label)
        assert explained(far, label) < honest < explained(near, label)
    table = geometry_summary(observed, [far, near], n_boot=99).tidy()
    gap = table.query("measure == 'cos_update_tokenwise' and function_class == 'local_mean'")
    gap = gap.set_index(["layer", "null"]).estimate
    assert all(gap[layer, "random_neighbours"] > 0 > gap[layer, "leak"] for layer in (1, 2))


def test_a_mean_of_random_neighbours_is_the_mean_of_random_updates(node) -> None:
    far = random_neighbours(node, draws=8).compute()
    mean = geometry(node)
    # k random updates about their mean: the error of the mean and 1/k of the spread more
    spread = (mean.update_centred_norm**2).mean().item()
    own = (mean.residual_norm.sel(function_class="mean") ** 2).mean().item()
    drawn = (far.residual_norm.sel(function_class="local_mean") ** 2).mean().item()
    assert drawn == pytest.approx(own + spread / 12, rel=0.05)


def test_random_rows_are_distinct_and_even() -> None:
    rng = np.random.default_rng(0)
    for size, k in ((40, 30), (5000, 20)):
        rows = random_rows(400, size, k, rng)
        assert all(len(set(row)) == k for row in rows.tolist())
        counts = np.bincount(rows.ravel(), minlength=size)
        expected = 400 * k / size
        assert ((counts - expected) ** 2 / expected).sum() < size + 5 * np.sqrt(2 * size)
    with pytest.raises(ValueError, match="k=6: only 5"):
        random_rows(2, 5, 6, rng)


def test_untrained_runs_the_whole_pipeline_anew() -> None:
    model = tiny_gpt2()
    states = extract(model, random_windows(24), progress=False)
    parts = decompose(states, ["mean", "affine"], k=8).compute()
    study = xr.DataTree.from_dict({"activations": states, "decomposition": parts})
    null = untrained(model, study, subspace=2, seed=5).compute()
    fresh = untrained_model(model, seed=5)
    again = decompose(extract(fresh, random_windows(24), progress=False), ["mean", "affine"], k=8)
    expected = geometry(again).relative_error.values
    np.testing.assert_allclose(null.relative_error.isel(null=0, draw=0), expected, rtol=1e-4)
    assert null.energy_residual.notnull().any() and str(null.model.values[0]) == model.key
    assert not np.allclose(null.relative_error, geometry(parts).relative_error, equal_nan=True)
    with pytest.raises(ValueError, match="left out at extraction"):
        states.attrs["n_tokens_left_out"] = 3
        untrained(model, xr.DataTree.from_dict({"activations": states, "decomposition": parts}))


def test_bad_arguments_are_named(node) -> None:
    with pytest.raises(ValueError, match="within='word'"):
        permuted(node, within="word")
    with pytest.raises(ValueError, match="activations and decomposition"):
        permuted(node["decomposition"].to_dataset())
    with pytest.raises(ValueError, match="draws=0"):
        random_neighbours(node, draws=0)
    kept = node["decomposition"].to_dataset().sel(function_class=["mean"])
    only = xr.DataTree.from_dict(
        {"activations": node["activations"].to_dataset(), "decomposition": kept}
    )
    with pytest.raises(ValueError, match="leak: none of the classes"):
        leak(only)
