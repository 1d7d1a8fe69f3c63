"""Figures draw what they are given: every value in place, one look a class, nothing global."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geomstats_lm import meta_analysis, plots
from geomstats_lm.figure_style import LINES, MARKERS, ONE_COLUMN, styles
from geomstats_lm.merging import correlate
from geomstats_lm.nulls import angle_variance
from tests.report_samples import planted_node


@pytest.fixture(scope="module")
def node() -> xr.DataTree:
    return xr.DataTree.from_dict(planted_node())


def profile(classes=("affine", "mean"), layers=(1, 2, 3)) -> pd.DataFrame:
    rows = [
        {"layer": v, "function_class": c, "estimate": i + 0.1 * v, "conf_low": i + 0.1 * v - 0.05,
         "conf_high": i + 0.1 * v + 0.05}
        for (i, c), v in itertools.product(enumerate(classes), layers)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def lines(ax: Axes) -> dict[str, np.ndarray]:
    return {str(v.get_label()): np.column_stack(v.get_data()) for v in ax.lines}


def test_profile_draws_values_and_intervals() -> None:
    frame = profile()
    ax = plots.plot_layer_profile(frame, "estimate", label="Spearman")
    drawn = lines(ax)
    for name, part in frame.groupby("function_class"):
        np.testing.assert_allclose(drawn[name], part[["layer", "estimate"]])
    assert len(ax.collections) == 2  # a band a class
    low = min(p.vertices[:, 1].min() for c in ax.collections for p in c.get_paths())
    assert low == pytest.approx(frame["conf_low"].min())
    assert ax.get_xlabel() == "layer" and ax.get_ylabel() == "Spearman"
    assert ax.figure.get_figwidth() == ONE_COLUMN
    assert {t.get_text() for t in ax.get_legend().get_texts()} == {"affine", "mean"}


def test_profile_of_what_was_observed_has_its_null_but_not_another_columns_interval() -> None:
    frame = profile().rename(columns={"estimate": "observed"})
    frame = frame.assign(null_mean=0.5, null_low=0.4, null_high=0.6)
    ax = plots.plot_layer_profile(frame, "observed")
    grey = [line for line in ax.lines if line.get_color() == "0.55"]
    assert grey and all((line.get_ydata() == 0.5).all() for line in grey)
    # conf_low is of the difference, so the only bands are the null's, one for each class's
    assert {tuple(np.round(p.vertices[:, 1].min() * 10)[None]) for c in ax.collections
            for p in c.get_paths()} == {(4.0,)}  # fmt: skip


def test_models_and_ways_of_patching_are_panels_with_one_legend() -> None:
    frame = pd.concat(
        [profile().assign(model=m, positions=p) for m in ("a", "b") for p in ("all", "single")]
    )
    figure = plots.plot_layer_profile(frame, "estimate")
    assert isinstance(figure, Figure) and len(figure.axes) == 4 and len(figure.legends) == 1
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[0] == "a, all positions at once"
    with pytest.raises(ValueError, match="several panels"):
        plots.plot_layer_profile(frame, "estimate", ax=Figure().subplots())
    with pytest.raises(ValueError, match="several rows of one layer"):
        plots.plot_layer_profile(pd.concat([profile(), profile()]), "estimate")


def test_nothing_is_global_and_given_axes_are_used() -> None:
    import matplotlib
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    ax = Figure().subplots()
    assert plots.plot_layer_profile(profile(), "estimate", ax=ax) is ax
    plots.plot_alignment_heatmap(profile(), "estimate")
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_looks_differ_in_grey() -> None:
    looks = styles([f"class {i}" for i in range(8)])
    assert len({(v["marker"], v["ls"]) for v in looks.values()}) == 8
    assert len(MARKERS) >= 8 and len(LINES) == 4


def test_heatmap_writes_every_value() -> None:
    frame = profile().assign(r2_centred=lambda f: f["estimate"])
    ax = plots.plot_alignment_heatmap(frame)
    assert [t.get_text() for t in ax.texts] == [f"{v:.2f}" for v in frame["r2_centred"]]
    frame.loc[0, "r2_centred"] = np.nan
    assert len(plots.plot_alignment_heatmap(frame).texts) == len(frame) - 1


def test_angles_have_the_band_of_a_random_direction(node) -> None:
    geometry = node["geometry"].to_dataset()
    ax = plots.plot_angles(geometry, layers=[1, 3], function_class="affine")
    half = 1.96 * np.sqrt(angle_variance(geometry.attrs["dim"]))
    (band,) = ax.patches
    assert band.get_y() == pytest.approx(90 - half)
    assert band.get_height() == pytest.approx(2 * half)
    medians = next(line for line in ax.lines if line.get_marker() == "o")
    expected = geometry.angle_residual_tokenwise.isel(model=0, function_class=0)
    expected = expected.sel(layer=[1, 3]).median("token")
    np.testing.assert_allclose(medians.get_ydata(), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="accepted are"):
        plots.plot_angles(geometry, function_class="none")


def test_energies_need_a_subspace(node) -> None:
    with pytest.raises(ValueError, match=r"geometry\(node, subspace=m\)"):
        plots.plot_subspace_energy(node["geometry"].to_dataset())
    frame = pd.DataFrame({"layer": [1, 2], "pooled_energy_update": [0.9, 0.8],
                          "pooled_energy_residual": [0.2, 0.3], "energy_forced": 0.1})  # fmt: skip
    drawn = lines(plots.plot_subspace_energy(frame))
    assert drawn["residual"][:, 1].tolist() == [0.2, 0.3]
    assert drawn["m/d (random direction)"][:, 1].tolist() == [0.1, 0.1]


def test_error_and_damage(node) -> None:
    correlation = correlate(
        node["geometry"].to_dataset(), node["perturbation"].to_dataset(), n_boot=100
    )
    one = {"layer": 2, "function_class": "affine", "positions": "all"}
    ax = plots.plot_error_damage(
        node, "residual_norm", control="exchanged", correlation=correlation, **one
    )
    row = correlation.tidy().query("layer == 2 and positions == 'all'").iloc[0]
    assert ax.texts[0].get_text().startswith(f"Spearman {row['estimate']:.2f} [")
    assert ax.get_xscale() == ax.get_yscale() == "log"
    n = int(node["perturbation"].kl.sel(**one).notnull().sum())
    assert len(ax.collections[0].get_offsets()) == n
    drawn = lines(ax)
    # the planted control does half the damage of every token
    np.testing.assert_allclose(
        drawn["median, residual"][:, 1], 2 * drawn["median, exchanged"][:, 1], rtol=1e-6
    )
    assert (np.diff(drawn["median, residual"][:, 0]) > 0).all()
    with pytest.raises(ValueError, match="control='none': accepted are"):
        plots.plot_error_damage(node, control="none", **one)
    with pytest.raises(ValueError, match="layer=9"):
        plots.plot_error_damage(node, layer=9)


def test_many_tokens_become_a_density() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"relative_error": rng.random(2001) + 0.1, "kl": rng.random(2001) + 0.1})
    many = plots.plot_error_damage(frame)
    few = plots.plot_error_damage(frame.iloc[:2000])
    assert type(many.collections[0]).__name__ == "PolyCollection"
    assert type(few.collections[0]).__name__ == "PathCollection"


def test_dose_response_of_a_planted_square() -> None:
    factors = [0.25, 0.5, 1.0]
    dims = ("model", "function_class", "replacement", "positions", "layer", "token")
    kl = np.ones((1, 1, 3, 1, 1, 20)) * (np.array(factors) ** 2)[:, None, None, None]
    data = xr.Dataset(
        {"kl": (dims, kl), "kl_control": ((*dims[:4], "control", "draw", *dims[4:]),
                                          kl[:, :, :, :, None, None] / 4)},
        {"model": ["m"], "function_class": ["affine"], "replacement": ["a", "b", "c"],
         "positions": ["all"], "layer": [2], "control": ["exchanged"],
         "factor": ("replacement", factors), "document": ("token", np.arange(20) // 2)},
    )  # fmt: skip
    for given in (data, data.drop_vars("kl_control")):
        ax = plots.plot_dose_response(given)
        np.testing.assert_allclose(lines(ax)["layer 2"], [(f, f**2) for f in factors])
    control = plots.plot_dose_response(data).lines[1]
    np.testing.assert_allclose(control.get_ydata(), np.array(factors) ** 2 / 4)
    with pytest.raises(ValueError, match="perturb\\(factors="):
        plots.plot_dose_response(data.drop_vars("factor"))


def synthesis(by=None):
    rng = np.random.default_rng(0)
    rows = [
        {"model": f"model {i}", "positions": p, "estimate": e, "std_error": 0.05}
        for p in (("all", "single") if by else ("all",))
        for i, e in enumerate(np.tanh(0.6 + 0.1 * rng.normal(size=5)))
    ]
    return meta_analysis(pd.DataFrame(rows), by=by)


def test_forest_has_a_row_a_model_and_the_average() -> None:
    meta = synthesis()
    ax = plots.plot_forest(meta)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == [f"model {i}" for i in range(5)] + ["average"]
    row = meta.tidy().iloc[0]
    (diamond,) = ax.patches
    corners = diamond.get_xy()[:4, 0]
    np.testing.assert_allclose(
        [corners.min(), corners[1], corners.max()],
        row[["conf_low", "estimate", "conf_high"]].to_numpy(float),
    )
    assert ax.texts[-1].get_text() == (
        f"{row['estimate']:.2f} [{row['conf_low']:.2f}, {row['conf_high']:.2f}]"
    )
    grouped = plots.plot_forest(synthesis(["positions"]))
    assert len(grouped.patches) == 2 and len(grouped.get_yticklabels()) == 2 * 7
    with pytest.raises(TypeError, match="meta_analysis"):
        plots.plot_forest(profile())


def test_funnel_holds_every_study() -> None:
    meta = synthesis()
    ax = plots.plot_funnel(meta)
    points = [line.get_xydata()[0] for line in ax.lines if line.get_marker() not in ("None", None)]
    studies = meta.studies
    np.testing.assert_allclose(points, np.column_stack([studies["y"], np.sqrt(studies["v"])]))
    assert ax.get_ylim()[0] > ax.get_ylim()[1] == 0  # precise studies on top
    assert isinstance(plots.plot_funnel(synthesis(["positions"])), Figure)


def test_capacity_takes_other_settings_at_their_best() -> None:
    rows = [
        {"k": k, "ridge": r, "class_name": "affine", "layer": 1, "estimate": 1 / k + r,
         "std_error": 0.01}
        for k in (4, 8, 16) for r in (0.1, 1.0)
    ]  # fmt: skip
    ax = plots.plot_capacity(pd.DataFrame(rows))
    (container,) = ax.containers
    line, _, (bars,) = container
    np.testing.assert_allclose(line.get_ydata().astype(float), [1 / k + 0.1 for k in (4, 8, 16)])
    lengths = [float(np.diff(v[:, 1]).item()) for v in bars.get_segments()]
    np.testing.assert_allclose(lengths, 0.02)
    assert isinstance(
        plots.plot_capacity(pd.concat([pd.DataFrame(rows), pd.DataFrame(rows).assign(layer=2)])),
        Figure,
    )


def test_strip_is_escaped_and_says_its_numbers() -> None:
    strip = plots.token_strip(["a<b>", "\n", "c"], [1.0, np.nan, 3.0], label='"kl"', focus=2)
    assert "a&lt;b&gt;" in strip and "<b>" not in strip and "↵" in strip
    assert 'title="&quot;kl&quot; 3"' in strip and "no &quot;kl&quot;" in strip
    shares = [float(v) for v in re.findall(r"--a:([\d.]+)", strip)]
    assert shares == [0.0, 1.0] and strip.count('class="focus"') == 1
    with pytest.raises(ValueError, match="values"):
        plots.token_strip(["a", "b", "c"], [1.0])
    for wrong in ({"kind": "x"}, {"focus": 3}, {"limits": (2, 1)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            plots.token_strip(["a", "b", "c"], [1, 2, 3], **wrong)


def test_wrong_data_is_named() -> None:
    with pytest.raises(TypeError, match="a result with tidy"):
        plots.plot_layer_profile([1, 2], "estimate")
    with pytest.raises(ValueError, match="no colour in it"):
        plots.plot_layer_profile(profile(), "colour")
    with pytest.raises(ValueError, match="no rows to draw"):
        plots.plot_layer_profile(profile().iloc[:0], "estimate")
