"""Nulls keep what they promise to keep; what is drawn from them is called distinct no more often
than the level says, what is planted beside them is."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import xarray as xr

from geomstats_lm import geometry
from geomstats_lm.geometry_summary import VERDICTS, geometry_summary
from geomstats_lm.layer_means import cluster_means
from geomstats_lm.nulls import angle_variance, direction_spread, exchanged, forced, isotropic
from tests.planted import first_dims, planted
from tests.test_geometry import decomposition


@pytest.mark.parametrize(("ratio", "dim"), [(0.3, 4), (0.7, 16), (2.0, 16), (1.0, 300)])
def test_spread_of_random_directions_is_that_of_draws(ratio, dim) -> None:
    rng = np.random.default_rng(0)
    # the squared cosine to a fixed direction is Beta(1/2, (d - 1)/2)
    c = rng.choice([-1, 1], 200_000) * np.sqrt(rng.beta(0.5, (dim - 1) / 2, 200_000))
    size = np.sqrt(1 + 2 * ratio * c + ratio**2)
    error = ratio / size
    kept = error < 1
    differences = np.stack(
        [
            (1 + ratio * c)[kept] / size[kept] - np.sqrt(1 - error[kept] ** 2),
            (ratio + c)[kept] / size[kept] - error[kept],
        ]
    )
    found = direction_spread(np.array([ratio]), dim)[0]
    # four standard errors of a mean of 200,000 (fewer kept), and of their variance
    bounds = 4 * differences.std(axis=1) / np.sqrt(kept.sum())
    assert (np.abs(found[:, 0] - differences.mean(axis=1)) < bounds).all()
    np.testing.assert_allclose(found[:, 1], differences.var(axis=1), rtol=0.05)
    assert angle_variance(dim) == pytest.approx(np.degrees(np.arccos(c)).var(), rel=0.03)


@pytest.mark.parametrize("null", [isotropic, exchanged])
def test_draws_keep_norms_and_depend_on_no_chunk_or_scheduler(null) -> None:
    data = planted(layers=2, documents=20)
    whole = null(data, draws=2, seed=3)
    for tokens, layers, scheduler in ((50, 1, "synchronous"), (64, 2, "threads")):
        with dask.config.set(scheduler=scheduler):
            chunked = null(data.chunk({"token": tokens, "layer": layers}), draws=2, seed=3)
            xr.testing.assert_allclose(whole, chunked.compute())
    dims = ("null", "model", "function_class", "draw", "layer", "token")
    assert whole.residual_norm.dims == dims
    norms = geometry(data).residual_norm.values
    angle = whole.angle_residual_tokenwise.isel(null=0)
    for draw in range(2):
        found = whole.residual_norm.isel(null=0, draw=draw).values
        np.testing.assert_allclose(found, norms, rtol=1e-5)
    assert not np.allclose(angle.isel(draw=0), angle.isel(draw=1))
    # another layer beside it changes no draw of a layer, another seed does
    one, other = (
        null(data.isel(layer=[1]), draws=1, seed=seed).angle_residual_tokenwise.isel(null=0)
        for seed in (3, 4)
    )
    xr.testing.assert_allclose(one, angle.isel(draw=[0], layer=[1]))
    assert not np.allclose(other, one)


def test_exchanged_residuals_are_other_tokens() -> None:
    data = planted(documents=3, per_document=2, dim=300, cosine=0.0)
    drawn = exchanged(data, draws=40)
    own = data["update"] - data.tokenwise.isel(function_class=0)
    unit = own / np.sqrt((own**2).sum("dim"))
    # angles to the own tokenwise part tell whose residual it was: the own is at 90 degrees exactly
    angles = drawn.angle_residual_tokenwise.values.reshape(40, 6)
    expected = np.degrees(np.arccos(np.einsum(
        "id,jd->ij",
        (data.tokenwise / np.sqrt((data.tokenwise**2).sum("dim"))).values[0, 0, 0],
        unit.values[0, 0],
    )))  # fmt: skip
    donors = np.abs(angles[..., None] - expected).argmin(axis=-1)
    assert (
        np.abs(angles - np.take_along_axis(expected[None], donors[..., None], 2)[..., 0]).max()
        < 1e-3
    )
    assert (donors != np.arange(6)).all()
    assert all(len(set(donors[:, i])) == 5 for i in range(6))


def test_forced_is_what_geometry_gives_at_a_right_angle() -> None:
    observed = geometry(decomposition(cosine=0.0, size=0.6)).sel(function_class="planted")
    expected = forced(observed).sel(null="forced")
    for name in expected:
        found, there = observed[name].values, observed.usable.values
        np.testing.assert_allclose(expected[name].values[there], found[there], atol=0.03)
    large = forced(geometry(decomposition(cosine=-0.9, size=1.5)).sel(function_class="planted"))
    assert large.cos_update_tokenwise.isnull().all()


def test_cluster_means_are_the_formula_at_drawn_clusters() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 6, 50)
    values = rng.standard_normal((2, 50))
    values[0, :7] = np.nan
    counts = np.array([[1, 0], [1, 2], [1, 1], [1, 1], [1, 2], [1, 0]])
    means, errors = cluster_means(values, codes, counts)
    for row in range(2):
        rows = [values[row, codes == g] for g in range(6)]
        rows = [r[np.isfinite(r)] for r in rows]
        drawn = [rows[g] for g in (1, 1, 2, 3, 4, 4)]
        for column, groups in ((0, rows), (1, drawn)):
            everything = np.concatenate(groups)
            mean = everything.mean()
            parts = np.array([(g - mean).sum() for g in groups])
            error = np.sqrt(6 / 5 * (parts**2).sum()) / len(everything)
            assert means[row, column] == pytest.approx(mean)
            assert errors[row, column] == pytest.approx(error)


def verdicts(data, *, n_boot=199, draws=0, **how):
    space = first_dims(data)
    observed = geometry(data, subspace=space)
    drawn = [isotropic(data, draws=draws, subspace=space)] if draws else []
    return geometry_summary(observed, drawn, n_boot=n_boot, **how)


@pytest.mark.parametrize("dim", [16, 128, 768])
def test_planted_residuals_return_their_values_within_intervals(dim) -> None:
    data = planted(dim=dim, documents=30, per_document=5, cosine=0.2, ratio=0.5)
    table = verdicts(data).tidy().set_index(["measure", "null"])
    row = table.loc[("angle_residual_tokenwise", "forced")]
    assert row.observed == pytest.approx(np.degrees(np.arccos(0.2)), abs=1e-3)
    assert row.forced == 90 and row.verdict == "distinct from forced: below"
    assert table.loc[("cos_update_tokenwise", "forced")].observed == pytest.approx(
        1.1 / np.sqrt(1.45), abs=1e-6
    )
    assert row.null_low < 90 < row.null_high

    low = planted(dim=dim, documents=30, per_document=5, energy=0.01 * 4 / dim, ratio=0.5)
    row = verdicts(low).tidy().set_index(["measure", "null"]).loc[("energy_residual", "isotropic")]
    assert row.observed == pytest.approx(0.01 * 4 / dim, rel=1e-4)
    assert row.null_mean == pytest.approx(4 / dim)
    assert row.verdict == "distinct from isotropic: below"
    assert row.conf_high < 0


def test_isotropic_residuals_are_seldom_called_distinct() -> None:
    """200 simulations, one a layer; 95 % intervals, so 5 % may be.

    Of 200 the 99.9th percentile of Binomial(200, .05) is 20: more would say that the rate is above
    nominal.
    """
    data = planted(layers=200, documents=30, per_document=5, dim=16)
    summary = verdicts(data, draws=4)
    fits = summary.glance().set_index("measure")
    assert set(fits.index) == set(VERDICTS)
    assert (fits.n_layers == 200).all() and (fits.n_no_verdict == 0).all()
    assert (fits.n_distinct <= 20).all(), fits
    table = summary.tidy().query("measure == 'angle_residual_tokenwise' and null == 'forced'")
    inside = (table.observed > table.null_low) & (table.observed < table.null_high)
    assert 180 <= inside.sum() <= 199  # 190 expected, three standard errors


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.4])
@pytest.mark.parametrize("dim", [3, 16, 100])
def test_nominal_rate_over_sizes(ratio, dim) -> None:
    """As above with 400 simulations: Binomial(400, .05) exceeds 35 less than once in a thousand."""
    m = min(4, dim - 1)
    data = planted(layers=400, documents=40, per_document=8, dim=dim, ratio=ratio, m=m)
    observed = geometry(data, subspace=first_dims(data, m))
    fits = geometry_summary(observed, n_boot=399).glance()
    assert (fits.n_distinct <= 35).all(), fits


def test_no_verdict_above_one_and_none_without_direction() -> None:
    worse = planted(ratio=1.5, cosine=-0.9, layers=2)
    table = verdicts(worse).tidy()
    assert (table.verdict == "no verdict").all()
    assert table.reason.str.contains("no better than no update").all()
    observed = geometry(decomposition()).sel(function_class=["identity"])
    assert (geometry_summary(observed, n_boot=99).tidy().verdict == "no verdict").all()


def test_summary_reads_as_a_page_and_other_nulls_give_no_verdict() -> None:
    data = planted(layers=2, cosine=0.3)
    observed = geometry(data)
    summary = geometry_summary(observed, [exchanged(data, draws=3)], n_boot=99)
    frame = summary.tidy()
    other = frame[frame.null == "exchanged"]
    assert len(other) and (other.verdict == "").all() and other.conf_low.notna().all()
    assert (other.null_low <= other.null_mean).all() and (other.null_mean <= other.null_high).all()
    assert set(summary.distinct().layer) == {1, 2}
    page = summary.summary()
    assert "forced" in page and "verdict" in page and "40 clusters by document" in page
    assert len(summary.augment()) == 2 * 400


def test_bad_arguments_are_named() -> None:
    data = planted(documents=4, per_document=2)
    observed = geometry(data)
    with pytest.raises(ValueError, match="draws=0"):
        isotropic(data, draws=0)
    with pytest.raises(ValueError, match=r"\['speed'\] are not variables"):
        geometry_summary(observed, measures=["speed"])
    with pytest.raises(ValueError, match="cluster='author' is no token coordinate"):
        geometry_summary(observed, cluster="author")
    with pytest.raises(ValueError, match="tokens are not those"):
        geometry_summary(observed, [isotropic(data.isel(token=[0, 1]), draws=1)])
    with pytest.raises(ValueError, match="exchanging needs two"):
        exchanged(data.isel(token=[0]))
