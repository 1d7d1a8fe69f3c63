"""The store: what is written comes back, what is unfinished is seen, what differs is refused."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from geomstats_lm.cube import (
    IncompleteError,
    SettingsError,
    has_leaf,
    list_leaves,
    model_key,
    open_cube,
    open_leaf,
    open_study,
    prepare_leaf,
    settings_of,
    token_runs,
    write_leaf,
    write_unit,
)
from geomstats_lm.encoding import from_bfloat16, to_bfloat16
from tests.cube_samples import activations, contents


@pytest.fixture
def store(tmp_path):
    return tmp_path / "study.zarr"


def write(dataset, store, key="tiny", leaf="activations", *, made="once", **how):
    return write_leaf(dataset, store, key, leaf, settings={"made": made}, progress=False, **how)


# --- round trip -----------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    n_layers=st.integers(0, 4),
    n_windows=st.integers(1, 9),
    length=st.integers(1, 5),
    windows_per_run=st.integers(1, 4),
    dim=st.integers(1, 6),
    dtype=st.sampled_from(["float32", "float64", "float16"]),
    by_class=st.booleans(),
)
def test_what_is_written_comes_back(
    n_layers, n_windows, length, windows_per_run, dim, dtype, by_class
):
    run = min(windows_per_run, n_windows) * length
    made = activations(n_layers, n_windows * length, dim, length=length, run=run)
    made["hidden"] = made.hidden.astype(dtype)
    made["flag"] = (made.hidden > 0).any("dim")
    if by_class:
        classes = xr.DataArray(["affine", "mean[scope=global]"], dims="function_class")
        made["tokenwise"] = made.hidden.expand_dims(function_class=classes).transpose(
            "model", "function_class", "layer", "token", "dim"
        )
    with tempfile.TemporaryDirectory() as folder:
        back = write(made, folder)
        assert back.chunksizes["token"] == made.chunksizes["token"]
        assert set(back.chunksizes["layer"]) == {1}
        expected = made.compute()
        if dtype == "float16":  # 16 bits on disk, 32 in memory
            expected = expected.map(lambda v: v.astype("f4") if v.dtype == np.float16 else v)
        xr.testing.assert_equal(back.compute(), expected)
        assert {n: v.dims for n, v in back.variables.items()} == {
            n: v.dims for n, v in made.variables.items()
        }
        integers = [n for n, c in made.coords.items() if c.dtype.kind in "iub"]
        assert {n: back[n].dtype for n in integers} == {n: made[n].dtype for n in integers}
        assert {k: v for k, v in back.attrs.items() if k != "settings"} == made.attrs


def test_labels_of_many_kinds_come_back(store):
    made = xr.Dataset(
        {"estimate": (("rank", "name"), np.arange(6.0).reshape(2, 3)), "total": 4.5},
        {
            "name": ["a", "bé", "longer than the others"],
            "rank": [10, 2],
            "checked": ("name", [True, False, True]),
            "note": ("rank", ["", "x"]),
        },
        {"method": "spearman", "numbers": [1, 2]},
    )
    back = write(made, store, "statistics", "rank_correlation")
    xr.testing.assert_equal(back.load(), made)
    assert back.name.dtype.kind == "U" and back.note.dtype.kind == "U"
    assert back.attrs["numbers"] == [1, 2]


def test_opening_loads_nothing_and_reading_is_one_pass_over_the_chunks(store):
    made = activations(3, 48, 5, run=8)
    write(made, store)
    hidden = open_study(store)["tiny/activations"].hidden
    assert hidden.chunks == ((1,), (1, 1, 1, 1), (8,) * 6, (5,))
    graph = dask.optimize(hidden.data)[0].__dask_graph__()
    reads = [k for k in dict(graph) if isinstance(k, tuple) and len(k) == 5]
    assert len(set(reads)) == 24  # one task a chunk, none read twice


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_chunks_of_nothing_but_fill_values_are_stored_too(store, fill):
    made = activations()
    made["hidden"] = xr.full_like(made.hidden, fill)
    made["is_massive"] = xr.zeros_like(made.hidden.isel(dim=0), dtype=bool)
    back = write(made, store)
    xr.testing.assert_equal(back.load(), made.compute())


# --- dtypes ---------------------------------------------------------------------------------


def stored_as(dtype, values, store):
    made = activations()
    made["hidden"] = made.hidden.copy(data=da.from_array(values, chunks=made.hidden.chunks))
    grid = {"layer": [(0, 4)], "token": token_runs(24, 8)}
    prepare_leaf(
        made, store, "tiny", "activations", settings={}, grid=grid, dtypes={"hidden": dtype}
    )
    for number, (start, stop) in enumerate(grid["token"]):
        write_unit(
            store, "tiny", "activations", (0, number),
            {
                "hidden": values[:, :, start:stop],
                "loss": made.loss[:, start:stop].values,
            },
            {
                "hidden": (slice(None), slice(None), slice(start, stop), slice(None)),
                "loss": (slice(None), slice(start, stop)),
            },
        )  # fmt: skip
    return open_leaf(store, "tiny", "activations")


@pytest.mark.parametrize(
    ("dtype", "relative"),
    # half a unit in the last place: 2^-11 of a 10-bit and 2^-8 of a 7-bit fraction; exact in 32
    [("float32", 0.0), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)],
)
def test_sixteen_bits_are_read_as_float32_within_half_a_unit(store, dtype, relative):
    values = activations().hidden.values
    back = stored_as(dtype, values, store)
    assert back.hidden.dtype == np.float32
    error = np.abs(back.hidden.values - values)
    smallest = 2.0**-25 if dtype == "float16" else 0.0  # half the step of float16's subnormals
    assert (error <= relative * np.abs(values) + smallest).all()
    assert (error.max() > 0) == (dtype != "float32")
    size = sum(len(v) for k, v in contents(store).items() if "/hidden/c/" in k)
    assert size == values.size * (4 if dtype == "float32" else 2)


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32, allow_nan=True, allow_infinity=True))
def test_bfloat16_rounds_as_torch_does(value):
    torch = pytest.importorskip("torch")
    ours = from_bfloat16(to_bfloat16(np.array([value], dtype=np.float32)))
    theirs = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "large", "fitting"),
    [("float16", 7e4, "bfloat16 or float32"), ("bfloat16", 3.4e38, "float32")],
)
def test_overflow_names_layer_count_and_the_dtype_that_fits(store, dtype, large, fitting):
    values = activations().hidden.values.copy()
    values[0, 2, 9, :3] = large
    values[0, 3, 10, 0] = -large
    with pytest.raises(OverflowError) as caught:
        stored_as(dtype, values, store)
    message = str(caught.value)
    assert f"4 values of 'hidden' overflow {dtype}" in message
    assert "layer 2: 3, layer 3: 1" in message
    assert message.endswith(f"store as {fitting}")
    # the first unit stays, the one that overflowed is not ticked off and holds no infinity
    with pytest.raises(IncompleteError, match="2 of 3 units"):
        open_leaf(store, "tiny", "activations")


def test_infinities_and_nan_of_the_data_are_kept(store):
    values = activations().hidden.values.copy()
    values[0, 0, 0, :3] = [np.inf, -np.inf, np.nan]
    back = stored_as("float16", values, store)
    np.testing.assert_array_equal(back.hidden.values[0, 0, 0, :3], [np.inf, -np.inf, np.nan])


def test_a_float64_that_does_not_fit_float32_is_refused(store):
    made = activations()
    made["hidden"] = made.hidden.astype(np.float64) + 1e300
    made["hidden"].data = made.hidden.data
    with pytest.raises(OverflowError, match="overflow float32"):
        grid = {"layer": [(0, 4)], "token": token_runs(24, 8)}
        prepare_leaf(
            made, store, "tiny", "activations", settings={}, grid=grid, dtypes={"hidden": "float32"}
        )
        write_unit(
            store, "tiny", "activations", (0, 0), {"hidden": made.hidden[:, :, :8].values},
            {"hidden": (slice(None), slice(None), slice(0, 8), slice(None))},
        )  # fmt: skip


# --- resuming -------------------------------------------------------------------------------


class Interrupted(RuntimeError):
    """Stands for whatever stops a computation half-way."""


def fragile(dataset, fails_at, calls):
    """The same data, computed through a function that fails at its ``fails_at``-th call."""

    def compute(block):
        if block.size == 0:  # dask asks for the shape of nothing first
            return block
        calls.append(block.shape)
        if len(calls) == fails_at:
            raise Interrupted
        return block

    with dask.config.set(scheduler="sync"):
        hidden = dataset.hidden.data.map_blocks(compute, dtype=dataset.hidden.dtype)
    return dataset.assign(hidden=dataset.hidden.copy(data=hidden))


@pytest.mark.parametrize("fails_at", [1, 2, 7, 12])
def test_an_interrupted_write_carries_on_and_ends_the_same(tmp_path, fails_at):
    made = activations()
    write(made, tmp_path / "whole")
    with dask.config.set(scheduler="sync"):
        calls: list = []
        with pytest.raises(Interrupted):
            write(fragile(made, fails_at, calls), tmp_path / "torn")
        assert not has_leaf(tmp_path / "torn", "tiny", "activations")
        with pytest.raises(IncompleteError, match=r"same command again"):
            open_leaf(tmp_path / "torn", "tiny", "activations")
        with pytest.raises(IncompleteError):
            open_study(tmp_path / "torn")
        assert list(open_study(tmp_path / "torn", incomplete="skip").children) == []
        again: list = []
        write(fragile(made, -1, again), tmp_path / "torn")
    # what was ticked off is not computed again: 12 units of one layer each
    assert len(again) == 12 - (fails_at - 1)
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_running_a_finished_step_again_does_nothing(store):
    made = activations()
    write(made, store)
    before = {f: f.stat().st_mtime_ns for f in store.rglob("*") if f.is_file()}
    calls: list = []
    write(fragile(made, 1, calls), store)
    assert calls == []
    assert before == {f: f.stat().st_mtime_ns for f in store.rglob("*") if f.is_file()}


def test_other_settings_are_refused_by_name_unless_overwritten(store):
    made = activations()
    write_leaf(made, store, "tiny", "activations", settings={"k": 32, "ridge": 1.0}, progress=False)
    before = contents(store)
    other = {"k": 16, "ridge": 1.0, "metric": "cosine"}
    with pytest.raises(SettingsError) as caught:
        write_leaf(made, store, "tiny", "activations", settings=other, progress=False)
    assert "k: stored 32, now 16" in str(caught.value)
    assert "metric: stored None, now 'cosine'" in str(caught.value)
    assert "ridge" not in str(caught.value)
    assert "overwrite=True" in str(caught.value)
    assert contents(store) == before
    back = write_leaf(
        activations(seed=1), store, "tiny", "activations", settings=other, overwrite=True,
        progress=False,
    )  # fmt: skip
    assert settings_of(back) == other
    xr.testing.assert_equal(back.load(), activations(seed=1).compute())


def test_overwriting_leaves_no_variable_of_before(store):
    made = activations()
    made["mixer"] = made.hidden * 2
    write(made, store)
    back = write(activations(), store, made="twice", overwrite=True)
    assert set(back.data_vars) == {"hidden", "loss"}
    assert not any("mixer" in name for name in contents(store))


def test_a_leaf_killed_before_its_ledger_was_there_is_made_anew(store):
    write(activations(), store)
    whole = contents(store)
    for file in (store / "tiny/activations/finished").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(IncompleteError, match="never set up"):
        open_leaf(store, "tiny", "activations")
    write(activations(), store)
    assert contents(store) == whole


def test_an_abandoned_leaf_of_other_settings_is_replaced(store, monkeypatch):
    monkeypatch.setattr("geomstats_lm.ledger.GRACE_SECONDS", 0.05)
    write(activations(), store, made="long ago")
    for file in (store / "tiny/activations/finished").rglob("*"):
        if file.is_file():
            file.unlink()
    back = write(activations(seed=3), store)
    assert settings_of(back) == {"made": "once"}
    xr.testing.assert_equal(back.load(), activations(seed=3).compute())


# --- what is missing ------------------------------------------------------------------------


def test_a_missing_chunk_is_an_error_and_not_nan(store):
    write(activations(), store)
    (store / "tiny/activations/hidden/c/0/2/1/0").unlink()
    with pytest.raises(IncompleteError, match=r"lost chunks.*'hidden': 1"):
        open_leaf(store, "tiny", "activations")


def test_a_missing_study_leaf_model_or_variable_is_named(store):
    with pytest.raises(FileNotFoundError, match=str(store)):
        open_study(store)
    write(activations(), store)
    with pytest.raises(FileNotFoundError, match="tiny/geometry"):
        open_leaf(store, "tiny", "geometry")
    with pytest.raises(KeyError, match=r"other.*tiny"):
        open_cube(store, models=["other"])
    with pytest.raises(KeyError, match=r"mixer.*hidden"):
        open_cube(store, variable="mixer")
    with pytest.raises(ValueError, match="incomplete='maybe'"):
        open_study(store, incomplete="maybe")


@pytest.mark.parametrize("chunks", [(8, 4, 8, 4), (4, 8, 8, 4), (4, 4, 16)])
def test_irregular_chunks_are_refused(store, chunks):
    made = activations().chunk({"token": chunks})
    with pytest.raises(ValueError, match="rechunk"):
        write(made, store)


def test_variables_that_are_chunked_differently_are_refused(store):
    made = activations()
    made["loss"] = made.loss.chunk({"token": 12})
    with pytest.raises(ValueError, match="disagree"):
        write(made, store)


def test_a_grid_that_tears_chunks_is_refused(store):
    grid = {"layer": [(0, 4)], "token": token_runs(24, 6)}
    with pytest.raises(ValueError, match="whole chunks of 'hidden'"):
        prepare_leaf(activations(), store, "tiny", "activations", settings={}, grid=grid)


# --- several models -------------------------------------------------------------------------


def test_adding_a_model_or_a_leaf_touches_no_other(store):
    write(activations(), store)
    first = contents(store / "tiny")
    write(activations(5, 32, 7, key="wide"), store, "wide")
    write(activations(seed=9).rename(hidden="update"), store, "tiny", "decomposition")
    assert list_leaves(store) == [
        "tiny/activations",
        "tiny/decomposition",
        "wide/activations",
    ]
    assert contents(store / "tiny/activations") == {
        k.removeprefix("activations/"): v for k, v in first.items() if k.startswith("activations")
    }
    study = open_study(store)
    assert study["tiny/activations"].sizes["dim"] == 5
    assert study["wide/activations"].sizes["dim"] == 7


def test_models_side_by_side_are_one_cube_padded_only_where_they_differ(store):
    write(activations(), store)
    write(activations(5, 32, 5, key="deep"), store, "deep")
    cube = open_cube(store)
    assert cube.dims == ("model", "layer", "token", "dim")
    assert dict(cube.sizes) == {"model": 2, "layer": 6, "token": 32, "dim": 5}
    assert cube.layer.dtype.kind == "i" and cube.chunks is not None
    tiny = cube.sel(model="tiny")
    assert not tiny.sel(layer=slice(0, 3), token=slice(0, 23)).isnull().any()
    assert tiny.sel(layer=slice(4, 5)).isnull().all()
    one = open_cube(store, models=["deep"])
    xr.testing.assert_equal(
        one.load(), activations(5, 32, 5, key="deep").hidden.compute().reset_coords(drop=True)
    )


def test_model_keys():
    assert model_key("EleutherAI/pythia-70m") == "eleutherai-pythia-70m"
    assert model_key("./out/My Model v1.5/") == "out-my-model-v1.5"
    for name in ("", "///", "Statistics"):
        with pytest.raises(ValueError, match="cannot name a group"):
            model_key(name)


# --- readers without this package -----------------------------------------------------------


def test_plain_xarray_finds_every_label_and_warns_of_nothing(store):
    made = activations()
    write(made, store)
    write(activations(5, 32, 7, key="wide"), store, "wide")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xr.open_datatree(store, engine="zarr", chunks={})
        alone = xr.open_zarr(store, group="wide/activations", chunks={})
    leaf = tree["tiny/activations"].to_dataset().drop_vars("finished").load()
    assert leaf.model.values.tolist() == ["tiny"]
    xr.testing.assert_equal(leaf.drop_vars("model"), made.drop_vars("model").compute())
    assert leaf.attrs["model_name"] == "org/tiny"
    assert alone.hidden.chunks == ((1,), (1,) * 6, (8,) * 4, (7,))


def test_plain_xarray_sees_finished_leaves_only(store):
    made = activations()
    write(made, store)
    with dask.config.set(scheduler="sync"), pytest.raises(Interrupted):
        write(fragile(activations(key="torn"), 3, []), store, "torn")
    tree = xr.open_datatree(store, engine="zarr", chunks={})
    assert list(tree.children) == ["tiny"]
    write(activations(key="torn"), store, "torn")
    assert set(xr.open_datatree(store, engine="zarr", chunks={}).children) == {"tiny", "torn"}
    with dask.config.set(scheduler="sync"), pytest.raises(Interrupted):
        write(fragile(made, 3, []), store, made="twice", overwrite=True)
    assert list(xr.open_datatree(store, engine="zarr", chunks={}).children) == ["torn"]


def test_a_store_that_cannot_be_written_to_is_read(store):
    write(activations(), store)
    files = [store, *store.rglob("*")]
    for file in files:
        Path(file).chmod(0o555 if file.is_dir() else 0o444)
    try:
        assert float(open_study(store)["tiny/activations"].hidden.sum()) == pytest.approx(
            float(activations().hidden.sum()), rel=1e-5
        )
    finally:
        for file in files:
            Path(file).chmod(0o755 if file.is_dir() else 0o644)
