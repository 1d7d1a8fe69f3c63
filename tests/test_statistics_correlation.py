"""The labelled verb: cells, masks, clusters, pooling, and what it says when it cannot answer."""

import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

from geomstats_lm.statistics import rank_correlation

DIMS = ("model", "function_class", "positions", "layer", "token")


def measurements(seed=0, n_documents=12, length=15, n_layers=3):
    """A small cube as geometry and perturbation leave it: NaN where a token is not patched."""
    rng = np.random.default_rng(seed)
    n = n_documents * length
    size = rng.gamma(2.0, size=(2, 2, n_layers, n))
    kl = size[:, :, None] * rng.gamma(2.0, size=(2, 2, 2, n_layers, n))
    kl[:, :, 1, :, ::4] = np.nan
    without_positions = tuple(dim for dim in DIMS if dim != "positions")
    return xr.Dataset(
        {
            "residual_norm": (without_positions, size),
            "relative_error": (without_positions, np.sqrt(size) + rng.normal(size=size.shape)),
            "kl": (DIMS, kl),
            "is_massive": (("model", "layer", "token"), rng.random((2, n_layers, n)) < 0.03),
        },
        coords={
            "model": ["small", "large"],
            "architecture": ("model", ["transformer", "ssm"]),
            "function_class": ["mean", "affine"],
            "positions": ["single", "all"],
            "layer": np.arange(1, n_layers + 1),
            "depth": ("layer", np.arange(1, n_layers + 1) / n_layers),
            "token": np.arange(n),
            "document": ("token", np.repeat(np.arange(n_documents), length)),
            "sequence": ("token", np.repeat(np.arange(n_documents), length)),
            "position": ("token", np.tile(np.arange(length), n_documents)),
            "is_special": ("token", np.arange(n) % length == 7),
        },
    )


@pytest.fixture(scope="module")
def data():
    return measurements()


@pytest.fixture(scope="module")
def result(data):
    return rank_correlation(data, n_boot=200)


def test_estimates_are_scipys_on_the_tokens_that_count(data, result):
    table = result.tidy()
    assert len(table) == 2 * 2 * 2 * 3
    assert table["model"].tolist() == ["small"] * 12 + ["large"] * 12
    for row in table.itertuples():
        at = {name: getattr(row, name) for name in DIMS[:-1]}
        cell = data.sel(**at)
        keep = (cell["kl"].notnull() & ~cell["is_massive"] & ~cell["is_special"]).values
        keep &= cell["position"].values > 0
        x, y = cell["residual_norm"].values[keep], cell["kl"].values[keep]
        assert row.n == keep.sum()
        assert row.estimate == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
        assert row.n + row.n_left_out + row.n_missing == data.sizes["token"]
        assert row.depth == cell["depth"] and row.architecture == cell["architecture"]


def test_columns_have_brooms_names_and_raw_values(result):
    expected = [
        *("model", "function_class", "positions", "layer", "architecture", "depth"),
        *("estimate", "std_error", "conf_low", "conf_high", "statistic", "p_value", "p_adjusted"),
        *("n", "n_clusters", "n_left_out", "n_missing", "n_degenerate"),
        *("method", "unit", "interval", "converged", "reason"),
    ]
    assert sorted(result.tidy().columns) == sorted(expected)
    assert not {"conf_low", "conf_high"} & set(result.tidy(conf_int=False).columns)
    assert result.glance()["n_rows"].item() == 24
    assert (result.tidy()["p_adjusted"] >= result.tidy()["p_value"]).all()


def test_lazy_data_and_frames_give_the_same_table(data, result):
    lazy = rank_correlation(data.chunk(layer=1, token=50), n_boot=200)
    pd.testing.assert_frame_equal(lazy.tidy(), result.tidy())
    frame = data.to_dataframe().reset_index()
    flat = rank_correlation(frame, n_boot=200).tidy()
    by = list(DIMS[:-1])
    sortable = result.tidy().drop(columns=["architecture", "depth"]).sort_values(by)
    pd.testing.assert_frame_equal(flat, sortable.reset_index(drop=True))


def test_the_interval_is_that_of_whole_documents_drawn_by_hand(data):
    cell = data.sel(model="small", function_class="affine", positions="single", layer=2, drop=True)
    result = rank_correlation(cell, n_boot=300, leave_out=())
    from geomstats_lm.statistics.resampling import draw_counts

    counts = draw_counts(12, 300, seed=0, label="")
    x, y, document = (cell[name].values for name in ("residual_norm", "kl", "document"))
    expected = [
        stats.spearmanr(np.repeat(x, w[document]), np.repeat(y, w[document])).statistic
        for w in counts.T
    ]
    np.testing.assert_allclose(result.replicates.values[0], expected, atol=1e-12)
    row = result.tidy().iloc[0]
    assert row["std_error"] == pytest.approx(np.std(expected, ddof=1))
    assert row["conf_low"] < row["estimate"] < row["conf_high"]


def test_cells_of_a_model_share_resamples_and_models_do_not(data):
    same = data.assign(
        kl=data["kl"]
        .isel(model=[0, 0], layer=[0, 0, 0])
        .assign_coords(model=data["model"], layer=data["layer"])
    )
    same["residual_norm"] = (
        data["residual_norm"]
        .isel(model=[0, 0], layer=[0, 0, 0])
        .assign_coords(model=data["model"], layer=data["layer"])
    )
    same = same.drop_vars("is_massive")
    first = rank_correlation(same, n_boot=50).replicates.values.reshape(2, 2, 2, 3, 50)
    np.testing.assert_array_equal(first[:, :, :, 0], first[:, :, :, 2])
    assert not np.allclose(first[0], first[1])
    shared = rank_correlation(same, n_boot=50, nested_in=()).replicates.values
    np.testing.assert_array_equal(shared[:12], shared[12:])


def test_a_models_rows_do_not_depend_on_which_other_models_are_there(data, result):
    alone = rank_correlation(data.sel(model=["large"]), n_boot=200).tidy()
    both = result.tidy().query("model == 'large'").reset_index(drop=True)
    drop = ["p_adjusted"]  # the family is smaller
    pd.testing.assert_frame_equal(alone.drop(columns=drop), both.drop(columns=drop))


def test_pool_averages_fisher_z_in_every_resample(result):
    pooled = result.pool("layer", {"first": [1], "rest": [2, 3]}, name="layer_group")
    table, cells = pooled.tidy(), result.tidy()
    assert table.columns[:4].tolist() == ["model", "function_class", "positions", "layer_group"]
    assert len(table) == 16
    first = table.query("layer_group == 'first'").reset_index(drop=True)
    single = cells.query("layer == 1").reset_index(drop=True)
    for name in ("estimate", "conf_low", "conf_high", "std_error", "n", "n_clusters"):
        np.testing.assert_allclose(first[name], single[name], rtol=1e-10)
    chosen = cells.query("model == 'small' and function_class == 'mean' and positions == 'all'")
    rest = table.query(
        "model == 'small' and function_class == 'mean' and positions == 'all' "
        "and layer_group == 'rest'"
    ).iloc[0]
    z = np.arctanh(chosen.query("layer > 1")["estimate"])
    assert rest["estimate"] == pytest.approx(np.tanh(z.mean()), abs=1e-12)
    assert rest["n"] == chosen.query("layer > 1")["n"].sum() and rest["n_clusters"] == 12
    with pytest.raises(ValueError, match=r"\[9\] are not labels of 'layer'"):
        result.pool("layer", {"none": [9]})
    with pytest.raises(ValueError, match="Did you mean 'layer'"):
        result.pool("layr")


def test_pooling_over_models_adds_their_clusters(result):
    table = result.pool("model").tidy()
    assert (table["n_clusters"] == 24).all() and (table["n_cells"] == 2).all()


def test_one_value_per_layer_is_another_claim(data):
    by_layer = rank_correlation(data, unit="layer", n_boot=100, leave_out=()).tidy()
    assert len(by_layer) == 8 and (by_layer["n"] == 3).all() and "layer" not in by_layer
    row = by_layer.query("model=='small' and function_class=='mean' and positions=='single'").iloc[
        0
    ]
    cell = data.sel(model="small", function_class="mean", positions="single")
    kept = cell["kl"].notnull()
    means = cell["kl"].mean("token"), cell["residual_norm"].where(kept).mean("token")
    assert row["estimate"] == pytest.approx(stats.spearmanr(*means).statistic, abs=1e-12)
    with pytest.raises(ValueError, match="fixes 'layer'"):
        rank_correlation(data, unit="layer", by=("model", "layer"))


def test_controls_and_norms_act_on_the_predictor(data):
    cell = data.sel(model="small", function_class="affine", positions="all", layer=2, drop=True)
    relative = rank_correlation(cell, norm="relative", n_boot=0, leave_out=()).tidy()
    expected = stats.spearmanr(cell["relative_error"], cell["kl"], nan_policy="omit").statistic
    assert relative["estimate"].item() == pytest.approx(expected, abs=1e-12)
    assert relative["interval"].item() == "none"
    held = rank_correlation(
        cell, "np.log(kl) ~ residual_norm | relative_error + position", n_boot=0
    )
    assert held.tidy()["estimate"].item() != pytest.approx(expected)
    with pytest.raises(ValueError, match="does not contain it"):
        rank_correlation(cell, "kl ~ relative_error", norm="standardized")
    with pytest.raises(ValueError, match="'residual_norm_standardized' is not in the data"):
        rank_correlation(cell, norm="standardized")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formula": "kl ~ residual_nrm"}, "Did you mean 'residual_norm'"),
        ({"formula": "kl + residual_norm"}, r"not of the form"),
        ({"formula": "kl ~ residual_norm + position"}, "behind a bar"),
        ({"by": ("modle", "layer")}, "Did you mean 'model'"),
        ({"cluster": "dokument"}, "Did you mean 'document'"),
        ({"method": "spearmen"}, "method='spearmen'"),
        ({"interval": "normal"}, "interval='normal'"),
        ({"unit": "head"}, "unit='head'"),
        ({"level": 95}, "level=95"),
        ({"n_boot": -1}, "n_boot=-1"),
        ({"adjust": "bh"}, "adjust='bh'"),
        ({"norm": "big"}, "norm='big'"),
        ({"partial": "no"}, "partial='no'"),
        ({"leave_out": ("is_speshul",)}, "Did you mean 'is_special'"),
    ],
)
def test_bad_arguments_are_named_with_what_is_accepted(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        rank_correlation(data, **arguments)


def test_other_containers_are_refused():
    with pytest.raises(TypeError, match=r"expected an xarray\.Dataset or a DataFrame, got dict"):
        rank_correlation({"kl": [1, 2]})


def frame(**columns):
    n = len(columns["kl"])
    return pd.DataFrame({"document": np.repeat(np.arange(10), n // 10), **columns})


@pytest.mark.parametrize("method", ["spearman", "kendall", "pearson", "biweight"])
def test_constant_columns_give_nan_and_a_reason(method):
    rng = np.random.default_rng(0)
    table = rank_correlation(
        frame(kl=rng.normal(size=40), residual_norm=np.full(40, 0.1)), method=method, n_boot=20
    ).tidy()
    assert np.isnan(table["estimate"].item()) and not table["converged"].item()
    assert table["reason"].item() == "the predictor is constant"
    assert np.isnan(table["p_adjusted"].item())


@pytest.mark.parametrize("interval", ["percentile", "basic", "bca"])
def test_a_perfect_relation_has_no_width_and_no_p_value(interval):
    x = np.random.default_rng(0).normal(size=40)
    row = (
        rank_correlation(frame(kl=x, residual_norm=x), n_boot=50, interval=interval).tidy().iloc[0]
    )
    assert row[["estimate", "conf_low", "conf_high"]].tolist() == pytest.approx([1.0] * 3)
    assert np.isnan(row["p_value"]) and "same value" in row["reason"]


def test_one_two_and_few_clusters_are_told():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 30))
    one = pd.DataFrame({"kl": y, "residual_norm": x, "document": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = rank_correlation(one, n_boot=50).tidy().iloc[0]
    assert np.isfinite(row["estimate"]) and np.isnan(row["conf_low"])
    assert row["reason"].startswith("one cluster")
    two = one.assign(document=np.arange(30) % 2)
    with pytest.warns(UserWarning, match="fewer than 10 clusters"):
        row = rank_correlation(two, n_boot=50).tidy().iloc[0]
    assert np.isfinite(row["conf_low"]) and row["reason"].startswith("fewer than 10 clusters")


def test_nan_pairs_go_before_ranking_and_infinities_keep_their_rank():
    y = np.r_[np.inf, np.arange(38.0), -np.inf]
    x = np.r_[38.0, np.nan, np.arange(1.0, 38.0), -1.0]
    table = frame(kl=y, residual_norm=x)
    row = rank_correlation(table, n_boot=20).tidy().iloc[0]
    assert row["estimate"] == pytest.approx(1.0) and row["n"] == 39 and row["n_missing"] == 1
    row = rank_correlation(table, n_boot=20, method="pearson").tidy().iloc[0]
    assert row["reason"] == "infinite values have no pearson correlation"


def test_integers_and_booleans_are_numbers():
    rng = np.random.default_rng(2)
    changed, size = rng.random(60) < 0.5, rng.integers(0, 9, 60)
    row = rank_correlation(frame(kl=changed, residual_norm=size), n_boot=20).tidy().iloc[0]
    assert row["estimate"] == pytest.approx(stats.spearmanr(changed, size).statistic, abs=1e-12)


def test_one_degenerate_cell_does_not_blank_the_others(data):
    broken = data.copy(deep=True)
    broken["kl"][0, 0, 0, 0] = 1.0
    table = rank_correlation(broken, n_boot=100).tidy()
    assert table["p_adjusted"].isna().sum() == 1 and table["p_adjusted"].notna().sum() == 23


def test_results_are_shown_in_every_form(result):
    page = result.summary()
    assert "Spearman correlation of kl ~ residual_norm over tokens" in page and "Note:" in page
    markdown = result.to_markdown().splitlines()
    assert markdown[0].startswith("| model | function_class") and len(markdown) > 26
    assert r"function\_class" in result.to_latex() and r"\toprule" in result.to_latex()
    assert "<table" in result.to_html() and result._repr_html_() == result.to_html()
    augmented = result.augment()
    assert len(augmented) == result.tidy()["n"].sum()
    first = augmented.query("model=='small' and function_class=='mean' and positions=='single'")
    first = first.query("layer == 1")
    assert np.corrcoef(first["rank_response"], first["rank_predictor"])[0, 1] == pytest.approx(
        result.tidy()["estimate"].iloc[0]
    )


def test_adjusting_within_families(data, result):
    within = rank_correlation(data, n_boot=200, adjust_over=("layer",)).tidy()
    for _, family in within.groupby(["model", "function_class", "positions"]):
        np.testing.assert_allclose(
            family["p_adjusted"], stats.false_discovery_control(family["p_value"])
        )


def test_lazy_data_are_read_one_layer_at_a_time(data):
    import dask.array

    read = []

    def watched(block, block_info=None):
        read.append(block_info[0]["array-location"][-2][0])
        return block

    chunked = data.chunk({"layer": 1, "token": -1})
    lazy = chunked.assign(
        {
            name: (
                chunked[name].dims,
                dask.array.map_blocks(
                    watched, chunked[name].data, meta=np.empty((0,) * chunked[name].ndim)
                ),
            )
            for name in ("kl", "residual_norm")
        }
    )
    rank_correlation(lazy, n_boot=10)
    runs = [layer for i, layer in enumerate(read) if i == 0 or read[i - 1] != layer]
    # once to see which documents there are, once to correlate
    assert runs == [0, 1, 2, 0, 1, 2]


def test_markdown_escapes_bars_in_names_and_cells() -> None:
    from geomstats_lm.statistics.results import markdown_table

    table = markdown_table(pd.DataFrame({"|r|": ["a|b"], "n": [3]}))
    assert table.splitlines() == [r"| \|r\| | n |", "| --- | --- |", r"| a\|b | 3 |"]
