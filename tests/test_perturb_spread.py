"""A perturbation in parts, over workers, and beside another one gives what one process gives."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from geomstats_lm import decompose, extract, perturb
from geomstats_lm.cube import IncompleteError, SettingsError, has_leaf, open_leaf
from geomstats_lm.models import parameter_checksum
from tests.model_samples import random_windows, tiny_gpt2

ASK = {"function_class": "mean", "n_single": 3, "batch_size": 1, "progress": False}


def parts_of(lm, *, n_windows=5, length=8):
    """Residuals drawn at random: what is spread does not depend on where they come from."""
    rng = np.random.default_rng(0)
    n = n_windows * length
    layers = np.arange(1, lm.n_layers + 1)
    return xr.Dataset(
        {
            "residual": (
                ("model", "function_class", "layer", "token", "dim"),
                rng.standard_normal((1, 1, lm.n_layers, n, lm.dim)).astype(np.float32) / 10,
            )
        },
        {
            "model": [lm.key], "function_class": ["mean"], "layer": layers,
            "depth": ("layer", layers / lm.n_layers), "position": ("token", np.arange(n) % length),
            "document": ("token", np.arange(n) // length),
            "token_id": ("token", rng.integers(0, lm.vocabulary, n)),
            "is_special": ("token", np.zeros(n, dtype=bool)),
        },
        {"window_length": length, "parameter_checksum": parameter_checksum(lm)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def gpt2():
    lm = tiny_gpt2()
    parts = parts_of(lm)
    return lm, parts, perturb(lm, parts, **ASK)


def same(found: xr.Dataset, expected: xr.Dataset) -> None:
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("order", [(3, 1, 2)])
def test_parts_in_any_order_make_the_whole(gpt2, tmp_path, order) -> None:
    lm, parts, expected = gpt2
    store = tmp_path / "s.zarr"
    for number, i in enumerate(order):
        seen = perturb(lm, parts, store=store, part=(i, 3), **ASK)
        assert has_leaf(store, lm.key, "perturbation") == (number == 2)
        if number < 2:  # what others have not done yet reads as NaN, and no one is misled by it
            assert np.isnan(seen.damage_ratio).all()
            with pytest.raises(IncompleteError):
                open_leaf(store, lm.key, "perturbation")
    same(open_leaf(store, lm.key, "perturbation").compute(), expected)
    same(perturb(lm, parts, store=store, **ASK).compute(), expected)  # nothing left to do


def test_more_parts_than_runs_and_bad_parts(gpt2, tmp_path) -> None:
    lm, parts, expected = gpt2
    for i in range(1, 8):
        perturb(lm, parts, store=tmp_path / "s.zarr", part=(i, 7), **ASK)
    same(open_leaf(tmp_path / "s.zarr", lm.key, "perturbation").compute(), expected)
    for part in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="part="):
            perturb(lm, parts, store=tmp_path / "s.zarr", part=part, **ASK)
    for leaf in ("geometry", "a/b", ""):
        with pytest.raises(ValueError, match="leaf="):
            perturb(lm, parts, store=tmp_path / "s.zarr", leaf=leaf, **ASK)
    with pytest.raises(ValueError, match="pass store="):
        perturb(lm, parts, part=(1, 2), **ASK)


def test_two_perturbations_live_side_by_side(gpt2, tmp_path) -> None:
    lm, parts, expected = gpt2
    store = tmp_path / "s.zarr"
    perturb(lm, parts, store=store, **ASK)
    doses = perturb(lm, parts, store=store, factors=[0, 1], leaf="dose_response", **ASK)
    assert doses.replacement.values.tolist() == ["drop[factor=0]", "drop[factor=1]"]
    assert doses.factor.values.tolist() == [0, 1]
    same(open_leaf(store, lm.key, "perturbation").compute(), expected)
    np.testing.assert_allclose(
        doses.kl.isel(replacement=1).compute(), expected.kl, rtol=1e-5, atol=1e-10
    )
    with pytest.raises(SettingsError, match="replace: stored"):
        perturb(lm, parts, store=store, replace="keep_only", **ASK)
    scale = 2.0
    perturb(lm, parts, store=store, replace=lambda s, u, r: s + u - scale * r, leaf="own", **ASK)
    scale = 3.0
    with pytest.raises(SettingsError, match="replace"):  # another function of the same name
        perturb(
            lm, parts, store=store, replace=lambda s, u, r: s + u - scale * r, leaf="own", **ASK
        )


def test_threads_of_a_dask_worker_share_one_model(gpt2, tmp_path) -> None:
    from dask.distributed import Client

    lm, parts, expected = gpt2
    with Client(
        processes=False, n_workers=1, threads_per_worker=3, dashboard_address=None
    ) as client:
        same(perturb(lm, parts, client=client, **ASK), expected)
        stored = perturb(lm, parts, client=client, store=tmp_path / "s.zarr", **ASK)
        same(stored.compute(), expected)


@pytest.mark.slow
def test_dask_worker_processes_hold_a_copy_of_the_model(gpt2, tmp_path) -> None:
    from dask.distributed import Client

    lm, parts, expected = gpt2
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        stored = perturb(lm, parts, client=client, store=tmp_path / "s.zarr", factors=[1.0], **ASK)
    found = stored.compute().isel(replacement=0, drop=True)
    same(found.drop_vars("factor", errors="ignore"), expected)


def test_model_is_as_it_was_after_an_interrupt(gpt2) -> None:
    lm, parts, _ = gpt2
    before = parameter_checksum(lm)

    def interrupted(state, update, residual):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perturb(lm, parts, replace=interrupted, **ASK)

    def interrupts(module, args):
        raise KeyboardInterrupt

    handle = lm.blocks[2].register_forward_pre_hook(interrupts)  # in the middle of a pass
    with pytest.raises(KeyboardInterrupt):
        perturb(lm, parts, **ASK)
    handle.remove()
    for module in lm.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in module.__dict__
    assert parameter_checksum(lm) == before


def test_windows_that_are_not_whole_are_refused(gpt2) -> None:
    lm, parts, _ = gpt2
    with pytest.raises(ValueError, match="39 tokens are not whole windows of 8"):
        perturb(lm, parts.isel(token=slice(1, None)), **ASK)


def test_cubes_with_tokens_left_out_are_refused_before_anything_is_computed(monkeypatch) -> None:
    lm = tiny_gpt2()
    cube = extract(lm, random_windows(), tokens="position != 5", progress=False)
    parts = decompose(cube.chunk(), ["mean"], k=4)
    monkeypatch.setattr(xr.Dataset, "load", lambda self: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match=r"28 tokens are not whole windows.*without tokens="):
        perturb(lm, parts, function_class="mean", progress=False)
