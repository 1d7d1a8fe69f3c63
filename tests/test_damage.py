"""Ratios of damage with intervals that know of documents, against by-hand bootstraps."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from geomstats_lm.damage import damage_ratio
from geomstats_lm.statistics.resampling import draw_counts

DIMS = ("model", "function_class", "positions", "layer", "token")
DRAWN = ("model", "function_class", "positions", "control", "draw", "layer", "token")


def perturbation(*, ratio=1.4, n_documents=30, per_document=6, n_layers=3, draws=2, seed=0):
    """Damage of gamma-distributed size, a document effect, and a known ratio of means."""
    rng = np.random.default_rng(seed)
    n = n_documents * per_document
    document = np.repeat(np.arange(n_documents), per_document)
    scale = rng.lognormal(0, 0.8, n_documents)[document]
    control = scale * rng.gamma(2, size=(1, 1, 2, 1, draws, n_layers, n))
    kl = ratio * scale * rng.gamma(2, size=(1, 1, 2, n_layers, n))
    kl[..., ::7] = np.nan  # not patched
    control[..., ::7] = np.nan
    return xr.Dataset(
        {"kl": (DIMS, kl), "kl_control": (DRAWN, control)},
        {
            "model": ["tiny"], "function_class": ["affine"], "positions": ["all", "single"],
            "control": ["exchanged"], "layer": np.arange(1, n_layers + 1),
            "document": ("token", document),
        },
    )  # fmt: skip


def test_ratio_and_interval_equal_a_bootstrap_by_hand() -> None:
    data = perturbation()
    found = damage_ratio(data, n_boot=499, seed=3).tidy()
    assert len(found) == 6 and found["n_clusters"].eq(30).all()
    kl, control = data.kl.values[0, 0, 1, 2], data.kl_control.values[0, 0, 1, 0, :, 2].mean(0)
    there, document = np.isfinite(kl), data.document.values
    row = found[(found.positions == "single") & (found.layer == 3)].iloc[0]
    assert row.estimate == pytest.approx(np.nansum(kl) / np.nansum(control), rel=1e-12)
    assert row.n == there.sum()
    counts = draw_counts(30, 499, seed=3, label="tiny")
    replicates = []
    for b in range(499):
        weight = counts[document, b]
        replicates.append((weight * kl)[there].sum() / (weight * control)[there].sum())
    assert row.std_error == pytest.approx(np.std(replicates, ddof=1), rel=1e-9)
    # `boot.ci` interpolates on a normal scale: between the two order statistics around each tail
    low, high = np.sort(replicates)[[11, 12]], np.sort(replicates)[[486, 487]]
    assert low[0] <= row.conf_low <= low[1] and high[0] <= row.conf_high <= high[1]


def test_groups_of_layers_pool_tokens_and_medians_pool_draws() -> None:
    data = perturbation()
    groups = {"first": [1], "rest": [2, 3]}
    directions = xr.DataArray([[[2.0, 3.0, 5.0]]], dims=("model", "function_class", "layer"))
    pooled = damage_ratio(
        data.assign(participation_ratio=directions), groups=groups, n_boot=199
    ).tidy()
    assert pooled.groupby("layer_group")["participation_ratio"].first().tolist() == [2, 4]
    row = pooled[(pooled.layer_group == "rest") & (pooled.positions == "all")].iloc[0]
    inside = data.sel(positions="all", layer=[2, 3])
    expected = float(inside.kl.sum() / inside.kl_control.mean("draw").sum())
    assert row.estimate == pytest.approx(expected, rel=1e-12)
    median = damage_ratio(data, groups=groups, n_boot=199, statistic="median").tidy()
    row = median[(median.layer_group == "rest") & (median.positions == "all")].iloc[0]
    assert row.damage == pytest.approx(float(inside.kl.median()), rel=1e-12)
    assert row.damage_control == pytest.approx(float(inside.kl_control.median()), rel=1e-12)
    assert row.conf_low < row.estimate < row.conf_high
    # the weighted median of a resample is the median of the data repeated as drawn
    counts = draw_counts(30, 199, seed=0, label="tiny")
    weight = counts[inside.document.values, 0]
    repeated = np.repeat(inside.kl.values[0, 0].reshape(2, -1), weight, axis=1)
    from geomstats_lm.damage import _medians

    values = inside.kl.values[0, 0][None]
    weighted = _medians(values, np.isfinite(values[0]), inside.document.values, 30)
    assert weighted(counts)[0] == pytest.approx(np.nanmedian(repeated), rel=1e-12)


@pytest.mark.slow
def test_intervals_cover_the_true_ratio() -> None:
    """Half of 400 simulated studies' 90 % intervals may miss by 3 binomial standard errors."""
    hit = 0
    for seed in range(400):
        row = damage_ratio(
            perturbation(seed=seed, n_layers=1, n_documents=40), n_boot=299, level=0.9
        ).tidy().iloc[0]  # fmt: skip
        hit += row.conf_low <= 1.4 <= row.conf_high
    # a percentile bootstrap of a skewed ratio with 40 clusters runs a few percent short
    assert 0.84 <= hit / 400 <= 0.945


def test_tokens_of_a_document_are_not_independent() -> None:
    """Intervals by documents are wider than by single tokens where documents differ."""
    data = perturbation(n_layers=1, per_document=20)
    spread = data.kl * xr.DataArray(
        np.random.default_rng(5).lognormal(0, 0.7, 30)[data.document.values], dims="token"
    )
    data = data.assign(kl=spread, each=("token", np.arange(data.sizes["token"])))
    data = data.set_coords("each")
    wide = damage_ratio(data, n_boot=399).tidy()["std_error"]
    narrow = damage_ratio(data, n_boot=399, cluster="each").tidy()["std_error"]
    assert (wide > 1.5 * narrow).all()


def test_bca_and_reasons() -> None:
    data = perturbation(n_layers=1)
    bca = damage_ratio(data, interval="bca", n_boot=399).tidy().iloc[0]
    plain = damage_ratio(data, n_boot=399).tidy().iloc[0]
    assert bca.interval == "bca" and bca.reason == "" and bca.conf_low != plain.conf_low
    nothing = damage_ratio(data.assign(kl_control=data.kl_control * 0)).tidy()
    assert nothing["estimate"].isna().all()
    assert (nothing["reason"] == "the control does no damage").all()
    one = damage_ratio(data.assign_coords(document=data.document * 0)).tidy()
    assert one["conf_low"].isna().all() and (one["reason"] == "one cluster has no interval").all()
    unpatched = damage_ratio(data.assign(kl=data.kl * np.nan)).tidy()
    assert (unpatched["reason"] == "no patched tokens").all()
    observed = damage_ratio(data, n_boot=19).augment()
    assert len(observed) == int(np.isfinite(data.kl).sum())
    assert {"document", "kl", "kl_control"} <= set(observed)


def test_bad_arguments_are_named() -> None:
    data = perturbation()
    for arguments, match in [
        ({"measure": "js"}, "measure='js': accepted are kl"),
        ({"statistic": "mode"}, "statistic='mode'"),
        ({"interval": "robust"}, "interval='robust'"),
        ({"cluster": "author"}, "cluster='author': accepted are the token labels document"),
        ({"groups": {"late": [9]}}, r"groups\['late'\]=\[9\]"),
        ({"groups": {}}, "groups: accepted is at least one"),
        ({"level": 2}, "level=2"),
    ]:
        with pytest.raises(ValueError, match=match):
            damage_ratio(data, **arguments)
    with pytest.raises(ValueError, match="no variable has a control"):
        damage_ratio(data[["kl"]])
