"""Planted angles come back, forced values follow from the error, left-out tokens do not count."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from geomstats_lm import geometry
from geomstats_lm.geometry import CLASS_MEASURES, STATE_MEASURES

LAYERS, WINDOWS, LENGTH = 3, 6, 5


def decomposition(*, dim: int = 16, cosine: float = 0.0, size: float = 0.5, seed: int = 0):
    """Residuals of ``size`` times the tokenwise part's norm, at a planted cosine to it."""
    rng = np.random.default_rng(seed)
    n = WINDOWS * LENGTH
    shape = (1, LAYERS, n, dim)
    tokenwise = rng.standard_normal(shape) * rng.uniform(1, 5, (1, LAYERS, n, 1))
    noise = rng.standard_normal(shape)
    unit = tokenwise / np.linalg.norm(tokenwise, axis=-1, keepdims=True)
    noise -= (noise * unit).sum(-1, keepdims=True) * unit
    noise /= np.linalg.norm(noise, axis=-1, keepdims=True)
    length = size * np.linalg.norm(tokenwise, axis=-1, keepdims=True)
    residual = length * (cosine * unit + np.sqrt(1 - cosine**2) * noise)
    update = (tokenwise + residual).astype(np.float32)
    dims = ("model", "layer", "token", "dim")
    massive = np.zeros(shape[:3], bool)
    massive[0, 1, 7] = True
    position = np.arange(n) % LENGTH
    return xr.Dataset(
        {
            "state": (dims, rng.standard_normal(shape).astype(np.float32)),
            "update": (dims, update),
            "tokenwise": (
                ("model", "function_class", *dims[1:]),
                np.stack([tokenwise, 0 * tokenwise], axis=1).astype(np.float32),
            ),
            "is_massive": (dims[:3], massive),
            "reference_update_mean": (("model", "layer", "dim"), update.mean(axis=2)),
            "reference_state_sd": (("model", "layer", "dim"), np.ones((1, LAYERS, dim))),
        },
        {
            "model": ["planted"],
            "function_class": ["planted", "identity"],
            "layer": np.arange(1, LAYERS + 1),
            "token": np.arange(n),
            "document": ("token", np.arange(n) // (2 * LENGTH)),
            "sequence": ("token", np.arange(n) // LENGTH),
            "position": ("token", position),
            "is_special": ("token", np.arange(n) == 13),
        },
    )


@settings(max_examples=20, deadline=None)
@given(dim=st.sampled_from([2, 16, 300]), cosine=st.floats(-0.95, 0.95), size=st.floats(0.05, 3.0))
def test_planted_angle_and_size_come_back(dim, cosine, size) -> None:
    measured = geometry(decomposition(dim=dim, cosine=cosine, size=size))
    one = measured.sel(function_class="planted")
    expected_update = np.sqrt(1 + size**2 + 2 * size * cosine)  # in norms of the tokenwise part
    found = one.angle_residual_tokenwise.values[one.usable.values]
    # float32 inputs: an angle near 0 or 180 degrees moves with the square root of rounding
    np.testing.assert_allclose(found, np.degrees(np.arccos(cosine)), atol=0.05)
    error = one.relative_error.values[one.usable.values]
    np.testing.assert_allclose(error, size / expected_update, rtol=2e-3)
    along = one.cos_update_tokenwise.values[one.usable.values]
    np.testing.assert_allclose(along, (1 + size * cosine) / expected_update, atol=2e-3)


def test_forced_values_equal_the_observed_at_a_right_angle_and_end_at_one() -> None:
    one = geometry(decomposition(cosine=0.0, size=0.7)).sel(function_class="planted")
    usable = one.usable.values
    for name in ("cos_update_tokenwise", "cos_update_residual"):
        np.testing.assert_allclose(
            one[name].values[usable], one[f"forced_{name}"].values[usable], atol=1e-5
        )
    large = geometry(decomposition(cosine=-0.9, size=1.5)).sel(function_class="planted")
    assert np.isnan(large.forced_cos_update_tokenwise).all()
    assert (large.n_error_above_one == large.n).all()


def test_identity_has_no_angle_and_error_one() -> None:
    identity = geometry(decomposition()).sel(function_class="identity")
    usable = identity.usable.values
    np.testing.assert_allclose(identity.relative_error.values[usable], 1.0, rtol=1e-6)
    for name in (
        "cos_update_tokenwise",
        "cos_centred",
        "forced_cos_centred",
        "angle_residual_tokenwise",
    ):
        assert np.isnan(identity[name]).all()
    np.testing.assert_allclose(identity.explained, 0.0, atol=1e-6)


def test_left_out_tokens_are_nan_counted_and_out_of_the_sums() -> None:
    data = decomposition()
    loud = data.copy(deep=True)
    loud["update"][0, 1, 7] = 1e6  # massive at layer 2
    loud["update"][0, :, 0] = 1e6  # first of its window
    loud["update"][0, :, 13] = 1e6  # special
    a, b = geometry(data), geometry(loud)
    np.testing.assert_array_equal(a.n.values, [[23, 22, 23]])
    np.testing.assert_array_equal(a.n_massive.values, [[0, 1, 0]])
    xr.testing.assert_allclose(a.explained, b.explained)
    assert np.isnan(a.relative_error.sel(token=[0, 13])).all()
    kept = geometry(data, exclude=False)
    assert np.isfinite(kept.relative_error.sel(token=[0, 13])).all()
    xr.testing.assert_allclose(kept.explained, a.explained)


def test_r2_centred_is_one_minus_error_over_spread() -> None:
    data = decomposition()
    found = geometry(data).sel(function_class="planted").r2_centred.values[0, 2]
    usable = (data.position > 0) & ~data.is_special
    update = data["update"].values[0, 2, usable].astype(float)
    residual = update - data.tokenwise.values[0, 0, 2, usable]
    centred = update - data.reference_update_mean.values[0, 2]
    assert found == pytest.approx(1 - (residual**2).sum() / (centred**2).sum(), abs=1e-6)


@settings(max_examples=8, deadline=None)
@given(tokens=st.sampled_from([5, 10, 15]), layers=st.integers(1, 3), classes=st.integers(1, 2))
def test_chunks_change_nothing(tokens, layers, classes) -> None:
    data = decomposition()
    whole = geometry(data)
    chunked = data.chunk({"token": tokens, "layer": layers, "function_class": classes})
    xr.testing.assert_allclose(whole, geometry(chunked).compute())


def test_stored_geometry_is_the_same_and_refuses_another_decomposition(tmp_path) -> None:
    data = decomposition().chunk({"token": 10, "layer": 1, "function_class": 1})
    data.attrs["settings"] = '{"k": 4}'
    stored = geometry(data, store=tmp_path / "s.zarr", progress=False)
    xr.testing.assert_allclose(stored.compute(), geometry(data).compute())
    other = data.assign_attrs(settings='{"k": 5}')
    with pytest.raises(ValueError, match=r"decomposition: stored \{'k': 4\}, now \{'k': 5\}"):
        geometry(other, store=tmp_path / "s.zarr", progress=False)


def test_every_measure_is_labelled_and_missing_variables_are_named() -> None:
    measured = geometry(decomposition())
    assert all(measured[n].attrs["long_name"] for n in {**STATE_MEASURES, **CLASS_MEASURES})
    with pytest.raises(ValueError, match=r"\['tokenwise'\] are missing"):
        geometry(decomposition().drop_vars("tokenwise"))


def test_energy_shares_add_up_and_token_means_are_the_floor() -> None:
    data = decomposition(cosine=0.4, size=0.8)
    labels = {"identity": "token_mean"}
    data = data.assign_coords(function_class=[labels.get(c, c) for c in data.function_class.values])
    measured = geometry(data)
    one = measured.sel(function_class="planted")
    # |r| is 0.8 of |t| at a cosine of 0.4: of sum |t|^2, 1 + 0.64 + 2 * 0.32 is the update
    np.testing.assert_allclose(one.energy_share_tokenwise, 1 / 2.28, rtol=1e-5)
    np.testing.assert_allclose(one.energy_share_residual, 0.64 / 2.28, rtol=1e-5)
    np.testing.assert_allclose(one.energy_share_product, 0.64 / 2.28, rtol=1e-5)
    np.testing.assert_allclose(one.explained_beyond_token_mean, one.explained, rtol=1e-6)
    floor = measured.sel(function_class="token_mean").explained_beyond_token_mean
    np.testing.assert_allclose(floor, 0, atol=1e-9)
    usable = one.usable.values
    np.testing.assert_allclose(one.cos_residual_tokenwise.values[usable], 0.4, atol=1e-5)
    for angle, cosine in (
        ("angle_next_state_state", "cos_next_state_state"),
        ("angle_next_state_tokenwise", "cos_next_state_tokenwise"),
    ):
        np.testing.assert_allclose(
            np.cos(np.radians(one[angle].values[usable])), one[cosine].values[usable], atol=1e-5
        )
