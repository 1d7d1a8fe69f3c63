"""The labelled decomposition: labels, exclusions, flags, schedulers and the store."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import xarray as xr

from geomstats_lm.cube import SettingsError, open_study
from geomstats_lm.decompose import DEFAULT_CLASSES, decompose
from tests import explicit
from tests.synthetic import activations

CLASSES = ["mean", "token_mean", "local_mean", "diagonal", "affine", "affine[scope=global]"]


@pytest.fixture(scope="module")
def data():
    return activations().load()


@pytest.fixture(scope="module")
def parts(data):
    return decompose(data, [*CLASSES, "identity", "affine[scope=global+local]"], k=16).compute()


def usable(data):
    return (data.position.values > 0) & ~data.is_special.values


def test_dims_and_labels_are_those_of_the_cube(data, parts):
    assert parts["tokenwise"].dims == ("model", "function_class", "layer", "token", "dim")
    assert parts["update"].dims == ("model", "layer", "token", "dim")
    assert parts.layer.values.tolist() == [1, 2]
    assert parts.depth.values.tolist() == [0.5, 1.0]
    evaluation = data.isel(token=data.split.values == 1)
    for name in ("token", "document", "sequence", "position", "token_id", "char_end", "split"):
        xr.testing.assert_identical(parts[name].variable, evaluation[name].variable)
    assert parts.token_id.dtype == np.int32
    assert parts.attrs["k"] == 16 and parts.attrs["exclude"] == "document"


def test_the_parts_add_up_exactly_as_declared(data, parts):
    evaluation = data.hidden.isel(token=data.split.values == 1)
    before, after = evaluation.isel(layer=slice(0, -1)), evaluation.isel(layer=slice(1, None))
    assert np.array_equal(parts["state"], before)
    assert np.array_equal(parts["update"], after.values - before.values)
    difference = parts["update"].values[:, None] - parts["tokenwise"].values
    assert np.array_equal(parts["residual"], difference)
    assert np.all(parts["tokenwise"].sel(function_class="identity") == 0)


def test_predictions_are_fits_on_neighbours_from_other_documents(data, parts):
    hidden = data.hidden.values[0].astype(np.float64)
    rows = np.flatnonzero((data.split.values == 0) & usable(data))
    for layer in (1, 2):
        X, D = hidden[layer - 1][rows], (hidden[layer] - hidden[layer - 1])[rows]
        for i in (0, 5, 16, 95):
            x = parts["state"].values[0, layer - 1, i].astype(np.float64)
            distance = np.linalg.norm(X - x, axis=1)
            near = np.argsort(distance)[:16]
            for label, formula in [
                ("affine", explicit.affine), ("diagonal", explicit.diagonal),
                ("local_mean", explicit.local_mean),
            ]:  # fmt: skip
                observed = parts["tokenwise"].sel(function_class=label, layer=layer)[0, i]
                expected = formula(x, X[near], D[near], 1.0)
                assert np.allclose(observed, expected, rtol=1e-4, atol=1e-5)
            observed = parts["tokenwise"].sel(function_class="affine[scope=global]", layer=layer)
            assert np.allclose(observed[0, i], explicit.affine(x, X, D, 0.01), atol=1e-5)
            mean = parts["neighbour_distance"].sel(layer=layer)[0, i]
            assert float(mean) == pytest.approx(distance[near].mean(), rel=1e-5)
            same = data.token_id.values[rows[near]] == parts.token_id.values[i]
            assert float(parts["same_token_fraction"].sel(layer=layer)[0, i]) == same.mean()
        assert np.allclose(parts["reference_update_mean"].sel(layer=layer)[0], D.mean(0), atol=1e-5)
        sd = hidden[layer][rows].std(0)
        assert np.allclose(parts["reference_state_sd"].sel(layer=layer)[0], sd, rtol=1e-5)
        median = np.median(np.linalg.norm(hidden[layer][rows], axis=1))
        assert np.allclose(parts["reference_norm_median"].sel(layer=layer), median, rtol=1e-5)
    assert np.all(parts["n_reference"] == len(rows))


def test_global_then_local_fits_locally_what_the_global_map_leaves(data, parts):
    hidden = data.hidden.values[0].astype(np.float64)
    rows = np.flatnonzero((data.split.values == 0) & usable(data))
    X, D = hidden[0][rows], (hidden[1] - hidden[0])[rows]
    left = D - explicit.affine(X, X, D, 0.01)
    for i in (1, 40):
        x = parts["state"].values[0, 0, i].astype(np.float64)
        near = np.argsort(np.linalg.norm(X - x, axis=1))[:16]
        expected = explicit.affine(x, X, D, 0.01) + explicit.affine(x, X[near], left[near], 1.0)
        observed = parts["tokenwise"].sel(function_class="affine[scope=global+local]", layer=1)
        assert np.allclose(observed[0, i], expected, rtol=1e-4, atol=2e-5)


def test_planted_noise_is_the_residual_and_held_out_error_ranks_the_classes():
    data = activations(dim=8, documents=40, noise=0.3, n_layers=1, seed=3)
    labels = ["identity", "mean", "token_mean", "affine[scope=global]"]
    parts = decompose(data, labels).compute()
    error = (parts["residual"] ** 2).mean(("model", "layer", "token", "dim")).to_series()
    assert list(error.sort_values(ascending=False).index) == labels
    # 384 tokens x 8 dims: sd of the mean of squares is .09 sqrt(2 / 3072) = .0023; fit adds 1 %
    assert error["affine[scope=global]"] == pytest.approx(0.09, abs=0.008)


def test_richer_classes_never_fit_their_own_reference_worse():
    data = activations(documents=6, n_layers=1)
    reference = data.isel(token=data.split.values == 0)
    twin = reference.assign_coords(
        token=reference.token + 10_000, document=reference.document + 100,
        sequence=reference.sequence + 100, split=("token", np.ones(reference.sizes["token"], int)),
    )  # fmt: skip
    both = xr.concat([reference, twin], "token", coords="minimal", compat="override")
    labels = ["identity", "mean", "diagonal[ridge=0,scope=global]", "affine[ridge=0,scope=global]"]
    parts = decompose(both.chunk(token=64), labels).compute()
    parts = parts.isel(token=parts.position.values > 0)
    error = (parts["residual"].astype(float) ** 2).sum(("model", "layer", "token", "dim")).values
    assert np.all(np.diff(error) < 0)


@pytest.mark.parametrize("exclude", ["document", "sequence", "self"])
def test_leave_one_out_never_uses_the_tokens_own_group(exclude):
    # every document is a tight cluster of its own, with its own constant update
    rng = np.random.default_rng(0)
    data = activations(n_layers=1, documents=6, split=1.0).load()
    document = data.document.values
    centres = 100 * rng.normal(size=(6, 12))
    data.hidden.values[0, 0] = centres[document] + 0.01 * rng.normal(size=(192, 12))
    sequence_update = rng.normal(size=(12, 12))[data.sequence.values]
    data.hidden.values[0, 1] = data.hidden.values[0, 0] + sequence_update
    parts = decompose(
        data.chunk(token=64), ["local_mean", "mean"], k=4, exclude=exclude, tokens="reference"
    ).compute()
    near = parts["neighbour_distance"].values[0, 0] < 1
    assert np.all(near == (exclude != "document"))
    error = np.linalg.norm(parts["residual"].values[0, 0, 0], axis=-1)
    if exclude == "self":  # its own window is there, its own row is not
        assert np.all(parts["neighbour_distance"] > 0)
        inside = parts.position.values > 0
        assert np.median(error[inside]) < np.median(np.linalg.norm(sequence_update, axis=1))
    # the global mean leaves out the document, or the sequence where exclude is narrower
    fold = document if exclude == "document" else data.sequence.values
    rows = usable(data)
    expected = np.stack([sequence_update[rows & (fold != f)].mean(0) for f in fold])
    assert np.allclose(parts["tokenwise"].values[0, 1, 0], expected, atol=1e-4)


def test_massive_tokens_are_flagged_kept_and_left_out_of_fits(data):
    changed = data.copy(deep=True)
    hidden = changed.hidden.values
    hidden[0, 1, 40] *= 173  # a reference token, massive after block 1 and before block 2
    hidden[0, 2, 300] *= 173  # an evaluation token, massive after block 2 only
    labels = ["affine", "affine[scope=global]", "mean"]
    parts = decompose(changed, labels, k=16).compute()
    clean = decompose(data, labels, k=16).compute()
    assert parts["n_reference_excluded_massive"].values.tolist() == [[1, 1]]
    assert np.all(parts["n_reference"] == clean["n_reference"] - 1)
    flagged = parts["is_massive"].values[0]
    assert flagged[0].sum() == 0 and parts.token.values[flagged[1]].tolist() == [300]
    assert np.isfinite(parts["tokenwise"]).all()
    others = parts.token.values != 300
    size = np.linalg.norm(parts["residual"].values[..., others, :], axis=-1)
    assert np.allclose(size, np.linalg.norm(clean["residual"].values[..., others, :], axis=-1),
                       atol=0.2)  # one token of 210 more or less  # fmt: skip


def test_special_and_first_tokens_are_never_references(data):
    changed = data.copy(deep=True)
    changed["is_special"] = ("token", data.token_id.values == 3)
    changed.hidden.values[0][:, (data.position.values == 0) | (data.token_id.values == 3)] = 1e3
    parts = decompose(changed, ["mean"], k=16).compute()
    left = (data.split.values == 0) & (data.position.values > 0) & (data.token_id.values != 3)
    assert np.all(parts["n_reference"] == left.sum())
    assert np.abs(parts["tokenwise"].values).max() < 100


def test_schedulers_agree_bit_for_bit_and_chunkings_to_rounding(data):
    labels = [*CLASSES, "linear", "scalar", "affine[scope=global+local]"]
    chunked = data.chunk(token=64, layer=1)
    lazy = decompose(chunked, labels, k=16)
    with dask.config.set(scheduler="synchronous"):
        one = lazy.compute()
    with dask.config.set(scheduler="threads", num_workers=4):
        two = lazy.compute()
    xr.testing.assert_identical(one, two)
    other = decompose(data.chunk(token=16, layer=3), labels, k=16).compute()
    for name in ("tokenwise", "residual", "neighbour_distance", "effective_df"):
        assert np.allclose(one[name], other[name], rtol=1e-6, atol=1e-6), name


def test_it_is_lazy_until_asked(data):
    lazy = decompose(data.chunk(token=64), ["mean"], k=16)
    assert all(v.chunks is not None for v in lazy.data_vars.values())
    assert lazy["tokenwise"].data.chunksize[-2] % 16 == 0


def test_it_is_written_to_the_study_and_comes_back(data, tmp_path):
    store = tmp_path / "study.zarr"
    options = {"k": 16, "progress": False, "store": store}
    written = decompose(data.chunk(token=64), CLASSES, **options)
    expected = decompose(data.chunk(token=64), CLASSES, k=16).compute()
    xr.testing.assert_equal(written.compute(), expected)
    tree = open_study(store)
    assert list(tree["tiny"].children) == ["decomposition"]
    with pytest.raises(SettingsError, match="k: stored 16, now 8"):
        decompose(data.chunk(token=64), CLASSES, **{**options, "k": 8})
    again = decompose(data.chunk(token=64), ["mean"], **{**options, "overwrite": True})
    assert again.function_class.values.tolist() == ["mean"]


def test_a_node_of_a_study_is_taken_as_its_activations(data):
    tree = xr.DataTree.from_dict({"/activations": data})
    node = decompose(tree, ["mean"], k=16, layers=[2], keep=["residual"])
    assert node.layer.values.tolist() == [2]
    assert "tokenwise" not in node and "residual" in node
    direct = decompose(data, ["mean"], k=16)
    assert np.array_equal(node["residual"].sel(layer=2), direct["residual"].sel(layer=2))


def test_a_cube_of_some_layers_gives_the_updates_whose_two_states_are_there():
    full = activations(n_layers=5).load()
    whole = decompose(full, ["mean"], k=4).compute()
    some = full.sel(layer=[1, 2, 5])
    with pytest.warns(UserWarning, match=r"layers \[5\] of data stand alone"):
        parts = decompose(some, ["mean"], k=4)
    assert parts.layer.values.tolist() == [2]
    xr.testing.assert_equal(parts.compute(), whole.sel(layer=[2]))
    for layers in ([5], [1, 2], [3]):
        with pytest.raises(ValueError, match=r"among \[2\].*holds layers \[1, 2, 5\]"):
            decompose(some, ["mean"], k=4, layers=layers)
    with pytest.raises(ValueError, match=r"among \[\].*states of l - 1 and l.*\[0, 2, 4\]"):
        decompose(full.sel(layer=[0, 2, 4]), ["mean"], k=4)


def test_a_cap_on_references_takes_whole_documents_at_random(data):
    few = [decompose(data, ["mean"], k=16, reference=60, seed=s).compute() for s in (0, 0, 1)]
    assert np.all(few[0]["n_reference"] == 60)
    xr.testing.assert_identical(few[0], few[1])
    assert not np.array_equal(few[0]["tokenwise"], few[2]["tokenwise"])


def test_target_state_fits_the_next_state(data):
    parts = decompose(data, ["affine", "mean"], k=16, target="state").compute()
    hidden = data.hidden.values[0].astype(np.float64)
    rows = np.flatnonzero((data.split.values == 0) & usable(data))
    x = parts["state"].values[0, 0, 3].astype(np.float64)
    X, Y = hidden[0][rows], hidden[1][rows]
    near = np.argsort(np.linalg.norm(X - x, axis=1))[:16]
    expected = explicit.affine(x, X[near], Y[near], 1.0) - x
    assert np.allclose(parts["tokenwise"].values[0, 0, 0, 3], expected, atol=1e-5)
    assert np.allclose(parts["tokenwise"].values[0, 1, 0, 3], Y.mean(0) - x, atol=1e-5)


@pytest.mark.parametrize("metric", ["cosine", "standardized"])
def test_other_metrics_choose_other_neighbours_and_report_plain_distances(data, metric):
    parts = decompose(data, ["local_mean"], k=16, metric=metric).compute()
    plain = decompose(data, ["local_mean"], k=16).compute()
    assert np.all(parts["neighbour_distance"] >= plain["neighbour_distance"] - 1e-5)
    assert not np.array_equal(parts["tokenwise"], plain["tokenwise"])


def test_d_of_one_and_k_above_d():
    wide = activations(dim=1, n_layers=1)
    parts = decompose(wide, DEFAULT_CLASSES, k=32).compute()
    assert np.isfinite(parts["tokenwise"]).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"k": 500}, "k=500: only 210 reference tokens are left"),
        ({"k": 0}, "integers >= 1"),
        ({"target": "x"}, "target='x'"),
        ({"metric": "x"}, "metric='x'"),
        ({"exclude": "x"}, "exclude='x'"),
        ({"tokens": "x"}, "tokens='x'"),
        ({"keep": ["x"]}, "keep contains"),
        ({"layers": [0]}, "layers=\\[0\\]"),
        ({"reference": 0}, "reference=0"),
        ({"classes": ["x"]}, "known are"),
        ({"k": 30, "tokens": "reference", "reference": 30}, "of them in its own document"),
    ],
)
def test_bad_arguments_are_named_before_any_work(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        decompose(data, **arguments)


def test_states_that_are_not_finite_are_an_error(data):
    for token in (5, 300):
        broken = data.copy(deep=True)
        broken.hidden.values[0, 1, token, 2] = np.nan
        with pytest.raises(ValueError, match="not finite"):
            decompose(broken, ["mean"], k=16).compute()


def test_data_without_states_or_labels_are_refused(data):
    with pytest.raises(ValueError, match="has none"):
        decompose(data.drop_vars("hidden"))
    with pytest.raises(ValueError, match="lacks the token coordinates"):
        decompose(data.drop_vars("document"))
