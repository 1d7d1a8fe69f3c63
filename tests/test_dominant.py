"""Subspaces of reference tokens only, as a study holds them, and how they are placed."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import xarray as xr

from geomstats_lm import decompose, geometry, open_study
from geomstats_lm.dominant import dominant_subspaces, subspace_relations
from geomstats_lm.subspaces import overlap
from tests.synthetic import activations

CLASSES = ["mean", "affine", "affine[scope=global]"]


@pytest.fixture(scope="module")
def reference() -> xr.Dataset:
    return decompose(activations(dim=16), CLASSES, k=12, tokens="reference")


def stacked_svd(data: xr.Dataset, part: str, label: str, layer: int, m: int) -> np.ndarray:
    usable = (data.position.values > 0) & ~data.is_massive.sel(layer=layer).values[0]
    rows = data[part].sel(function_class=label, layer=layer).values[0, usable].astype(float)
    return np.linalg.svd(rows, full_matrices=False)[2][:m]


@pytest.mark.parametrize("method", ["gram", "sketch"])
def test_subspaces_are_those_of_the_usable_reference_tokens(reference, method) -> None:
    found = dominant_subspaces(reference, 4, method=method).compute()
    data = reference.compute()
    for part in ("tokenwise", "residual"):
        for label in CLASSES[1:]:
            one = found.sel(function_class=label, layer=2)
            expected = stacked_svd(data, part, label, 2, 4)
            basis = one[f"{part}_basis"].values[0].astype(float)
            np.testing.assert_allclose(basis.T @ basis, expected.T @ expected, atol=1e-5)
    # the mean of the reference without the token's own document: nearly one direction
    share = found.sel(function_class="mean").tokenwise_energy_share
    assert (share > 0.999).all()


def test_chunks_and_schedulers_change_nothing(reference) -> None:
    data = reference.compute()
    whole = dominant_subspaces(data, 3)
    with dask.config.set(scheduler="synchronous"):
        whole = whole.compute()
    for chunks in ({"token": 32, "layer": 2}, {"token": 80, "function_class": 3}):
        chunked = dominant_subspaces(data.chunk(chunks), 3)
        with dask.config.set(scheduler="threads"):
            xr.testing.assert_allclose(chunked.compute(), whole, rtol=1e-4, atol=1e-5)


def test_a_tenth_of_the_reference_is_taken_in_whole_chunks(reference) -> None:
    data = reference.compute().chunk({"token": 32})  # two windows, seven chunks
    few = dominant_subspaces(data, 2, reference_tokens=64)
    assert (few.tokenwise_n == 2 * 30).all()  # less the first token of each of four windows


def test_geometry_of_a_node_has_energies_in_the_subspace_of_its_reference(tmp_path) -> None:
    store = tmp_path / "study.zarr"
    from geomstats_lm.cube import write_leaf

    write_leaf(activations(dim=16), store, "tiny", "activations", settings={}, progress=False)
    decompose(open_study(store)["tiny"], CLASSES, k=12, store=store, progress=False)
    node = open_study(store)["tiny"]
    stored = geometry(node, subspace=4, store=store, progress=False)
    again = geometry(open_study(store)["tiny"], subspace=4)
    xr.testing.assert_allclose(stored.energy_residual.compute(), again.energy_residual.compute())
    assert "subspace" in open_study(store)["tiny"].children
    with pytest.raises(ValueError, match="subspace"):
        geometry(node, subspace=3, store=store, progress=False)

    reference = decompose(node, CLASSES, k=12, tokens="reference").compute()
    basis = stacked_svd(reference, "tokenwise", "affine", 1, 4)
    one = node["decomposition"].to_dataset().sel(function_class="affine", layer=1)
    residual = one.residual.values[0].astype(float)
    energy = ((residual @ basis.T) ** 2).sum(1) / (residual**2).sum(1)
    found = stored.energy_residual.sel(function_class="affine", layer=1).values[0]
    usable = stored.usable.sel(layer=1).values[0]
    np.testing.assert_allclose(found[usable], energy[usable], atol=1e-5)
    assert np.isnan(found[~usable]).all()
    forced = stored.sel(function_class="affine").energy_forced
    assert (forced == 4 / 16).all()
    pooled = (residual[usable] @ basis.T) ** 2
    share = stored.pooled_energy_residual.sel(function_class="affine", layer=1).values.item()
    assert share == pytest.approx(pooled.sum() / (residual[usable] ** 2).sum(), abs=1e-6)


def test_centred_energies_are_about_the_reference_means(reference) -> None:
    data = activations(dim=16)
    space = dominant_subspaces(reference, 3, centred=True).compute()
    evaluation = decompose(data, CLASSES, k=12).compute()
    found = geometry(evaluation, subspace=space).sel(function_class="affine", layer=1)
    one = evaluation.sel(function_class="affine", layer=1)
    basis = space.tokenwise_basis.sel(function_class="affine", layer=1).values[0].astype(float)
    update = (one["update"] - one.reference_update_mean).values[0].astype(float)
    energy = ((update @ basis.T) ** 2).sum(1) / (update**2).sum(1)
    usable = found.usable.values[0]
    np.testing.assert_allclose(found.energy_update.values[0][usable], energy[usable], atol=1e-5)


def test_evaluation_tokens_give_no_subspace() -> None:
    evaluation = decompose(activations(), ["affine"], k=8)
    with pytest.raises(ValueError, match="by construction"):
        dominant_subspaces(evaluation)
    with pytest.raises(ValueError, match=r"subspace=4: .* by construction"):
        geometry(evaluation, subspace=4)


def test_relations_of_planted_subspaces() -> None:
    eye, dim, m = np.eye(12), 12, 2
    turned = np.cos(np.radians(30)) * eye[:2] + np.sin(np.radians(30)) * eye[4:6]
    tokenwise = np.stack([[eye[:2], eye[2:4], turned], [eye[:2], eye[:2], eye[:2]]])[None]
    residual = np.stack([[eye[:2], eye[6:8], 0 * eye[:2]]] * 2)[None]
    dims = ("model", "function_class", "layer", "component", "dim")
    spaces = xr.Dataset(
        {"tokenwise_basis": (dims, tokenwise), "residual_basis": (dims, residual)},
        {"model": ["m"], "function_class": ["a", "b"], "layer": [1, 2, 3]},
    )
    found = subspace_relations(spaces).sel(model="m")
    a = found.sel(function_class="a")
    np.testing.assert_allclose(a.angles_residual.sel(layer=[1, 2]), [[0, 0], [90, 90]], atol=1e-6)
    assert np.isnan(a.overlap_residual.sel(layer=3)) and np.isnan(a.angles_residual[2]).all()
    np.testing.assert_allclose(a.angles_previous_layer.sel(layer=2), 90)
    assert np.isnan(a.angles_previous_layer.sel(layer=1)).all()
    between = a.sel(other_class="b", layer=3)
    np.testing.assert_allclose(between.angles_classes, 30, atol=1e-9)
    assert between.overlap_classes.item() == pytest.approx(0.75) == overlap(turned, eye[:2])
    assert between.chance_classes.item() == m / dim
