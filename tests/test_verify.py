"""Every fault that is put into a study is found, named where it is, and nothing else is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr

from geomstats_lm.cube import prepare_leaf, token_runs, write_leaf, write_unit
from geomstats_lm.encoding import checksum, continued_as
from geomstats_lm.verify import verify_study
from tests.cube_samples import activations

LEAF = "tiny/activations"


def decomposition(made):
    """The leaf that decompose would make of an activations leaf, with two function classes."""
    hidden = made.hidden
    after = hidden.isel(layer=slice(1, None))
    before = hidden.isel(layer=slice(0, -1)).assign_coords(layer=after.layer, depth=after.depth)
    classes = xr.DataArray(["affine", "mean"], dims="function_class")
    order = ("model", "function_class", "layer", "token", "dim")
    part = (after * 0.5).expand_dims(function_class=classes).transpose(*order)
    return xr.Dataset(
        {
            "state": before, "update": after - before, "tokenwise": part, "residual": part * 2,
            "is_massive": (after.isel(dim=0, drop=True) > 1),
        },
        attrs=made.attrs | {"n_layers": 3},
    ).chunk({"function_class": 1})  # fmt: skip


@pytest.fixture
def store(tmp_path, sound):
    """A copy of the sound study, to be harmed."""
    return Path(shutil.copytree(sound, tmp_path / "study.zarr"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A study with a leaf written by whole layers, one by layers, and a table."""
    path = tmp_path_factory.mktemp("sound") / "study.zarr"
    made = activations().assign_attrs(n_layers=3)
    runs = token_runs(24, 8)
    prepare_leaf(
        made, path, "tiny", "activations", settings={"a": 1},
        grid={"layer": [(0, 4)], "token": runs},
    )  # fmt: skip
    for number, (start, stop) in enumerate(runs):
        run = slice(start, stop)
        every = slice(None)
        write_unit(
            path, "tiny", "activations", (0, number),
            {"hidden": made.hidden[:, :, run].values, "loss": made.loss[:, run].values},
            {"hidden": (every, every, run, every), "loss": (every, run)},
        )  # fmt: skip
    how = {"settings": {"a": 2}, "progress": False}
    # writing the next leaf publishes this one too
    write_leaf(decomposition(made), path, "tiny", "decomposition", **how)
    table = xr.Dataset(
        {"estimate": (("layer", "term"), np.eye(3)), "reason": ("layer", ["", "flat", ""])},
        {"layer": [1, 2, 3], "term": ["a", "b", "c"]},
    )
    write_leaf(table, path, "statistics", "rho", **how)
    return path


def checks(store, **how):
    """(leaf, variable, check) of all findings."""
    found = verify_study(store, quiet=True, **how)
    return set(found[["leaf", "variable", "check"]].itertuples(index=False, name=None))


@pytest.mark.parametrize("sample", [1, 2, None])
def test_a_sound_study_has_no_findings(store, capsys, sample):
    found = verify_study(store, sample=sample)
    assert found.empty
    assert list(found.columns) == ["leaf", "variable", "check", "problem", "advice"]
    # 3 units of all layers, 3 layers x 3 runs, and a table
    read = {1: 1 + 3 + 1, 2: 2 + 6 + 1, None: 13}[sample]
    assert found.attrs == {"n_leaves": 3, "n_units": 13, "n_units_read": read}
    assert f"3 leaves, 13 units, {read} of them read: nothing wrong" in capsys.readouterr().out


def test_findings_are_printed_with_place_and_advice(store, capsys):
    (store / LEAF / "hidden/c/0/2/1/0").unlink()
    verify_study(store)
    said = capsys.readouterr().out
    assert "tiny/activations/hidden [chunks] 1 finished chunks are missing: c/0/2/1/0" in said
    assert "-> copy the store again" in said
    verify_study(store, quiet=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("leaf", "file", "variable"),
    [
        (LEAF, "hidden/c/0/3/2/0", "hidden"),
        (LEAF, "loss/c/0/0", "loss"),
        (LEAF, "position/c/0", "position"),
        ("tiny/decomposition", "residual/c/0/1/2/0/0", "residual"),
        ("tiny/decomposition", "is_massive/c/0/0/1", "is_massive"),
        ("statistics/rho", "reason/c/0", "reason"),
    ],
)
def test_a_lost_chunk(store, leaf, file, variable):
    (store / leaf / file).unlink()
    assert (leaf, variable, "chunks") in checks(store)


@pytest.mark.parametrize(
    ("long_name", "of_digits"),  # the published check values of the two polynomials
    [("CRC-32C of each finished unit", 0xE3069283), ("CRC-32 of each finished unit", 0xCBF43926)],
)
def test_a_ledger_says_which_checksum_it_holds(long_name, of_digits):
    digits = np.frombuffer(b"123456789", dtype=np.uint8)
    assert checksum({"digits": digits}, continued_as(long_name)) == of_digits


@pytest.mark.parametrize(
    ("leaf", "file"),
    [(LEAF, "hidden/c/0/1/2/0"), (LEAF, "loss/c/0/2"), ("tiny/decomposition", "state/c/0/0/0/0")],
)
def test_a_changed_byte(store, leaf, file):
    path = store / leaf / file
    content = bytearray(path.read_bytes())
    content[5] ^= 1  # the lowest bits of a float: nothing but a checksum sees it
    path.write_bytes(content)
    assert checks(store, sample=None) == {(leaf, "", "checksum")}


def test_a_chunk_cut_short(store):
    path = store / LEAF / "hidden/c/0/1/2/0"
    path.write_bytes(path.read_bytes()[:-7])
    found = verify_study(store, sample=None, quiet=True)
    assert found[["leaf", "check"]].values.tolist() == [[LEAF, "checksum"]]
    assert "1 of 3 units cannot be read: (0, 2)" in found.problem.item()


def test_swapped_chunks(store):
    one, two = (store / LEAF / f"hidden/c/0/1/{i}/0" for i in (0, 1))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    problem = verify_study(store, sample=None, quiet=True).problem.item()
    assert "2 of 13" not in problem and "(0, 0), (0, 1)" in problem


def test_unfinished_units_and_half_written_files(store):
    (store / LEAF / "finished/c/0/1").unlink()
    (store / LEAF / "hidden/c/0/1/1/0").unlink()  # allowed: its unit is not ticked off
    assert checks(store) == {(LEAF, "finished", "ledger"), ("", "", "root")}
    (store / LEAF / "hidden/c/0/1/1/0.abc.partial").write_bytes(b"half")
    (store / LEAF / "hidden/c/0/9/9/9").parent.mkdir(parents=True)
    (store / LEAF / "hidden/c/0/9/9/9").write_bytes(b"stray")
    (store / LEAF / "notes.txt").write_text("mine")
    assert {
        (LEAF, "hidden", "files"), (LEAF, "notes.txt", "files")
    } < checks(store)  # fmt: skip
    (store / LEAF / "finished/zarr.json").unlink()
    assert (LEAF, "", "ledger") in checks(store)


def test_layers_of_zeros_and_values_that_are_not_finite(tmp_path):
    made = activations()
    values = made.hidden.values.copy()
    values[0, 1] = 0
    values[0, 2, :8] = 0  # a run of zeros is no layer of zeros
    values[0, 3, 13, 2] = np.nan
    made["hidden"] = made.hidden.copy(data=da.from_array(values, chunks=made.hidden.chunks))
    write_leaf(made, tmp_path, "tiny", "activations", settings={}, progress=False)
    found = verify_study(tmp_path, sample=None, quiet=True)
    assert found.problem.tolist() == ["not finite in layers [3]", "all zero in layers [1]"]
    assert set(found.variable) == {"hidden"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_cubes_are_sound_and_their_infinities_are_seen(tmp_path, dtype):
    made = activations()
    grid = {"layer": [(0, 4)], "token": [(0, 24)]}
    made = made.chunk({"token": 24})
    prepare_leaf(
        made, tmp_path, "tiny", "activations", settings={}, grid=grid, dtypes={"hidden": dtype}
    )
    values = {"hidden": made.hidden.values.copy(), "loss": made.loss.values}
    values["hidden"][0, 2, 3, 1] = np.inf
    regions = {"hidden": (slice(None),) * 4, "loss": (slice(None),) * 2}
    write_unit(tmp_path, "tiny", "activations", (0, 0), values, regions)
    assert checks(tmp_path) == {(LEAF, "hidden", "values"), ("", "", "root")}


def edit(store, node, change):
    """Change the metadata of a node of the store."""
    path = store / node / "zarr.json"
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("node", "change", "finding"),
    [
        ("hidden", lambda m: m.update(dimension_names=["model", "layer", "dim", "token"]),
         (LEAF, "hidden", "dims")),
        ("position", lambda m: m.update(dimension_names=["dim"]), (LEAF, "position", "labels")),
        ("hidden", lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[1, 2, 8, 5]),
         (LEAF, "hidden", "chunks")),
        ("loss", lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[1, 4]),
         (LEAF, "", "chunks")),
        ("loss", lambda m: m["attributes"].update(storage_dtype="bfloat16"),
         (LEAF, "loss", "dtype")),
        ("", lambda m: m["attributes"].update(settings="{half"), (LEAF, "", "attributes")),
        ("", lambda m: m["attributes"].update(n_layers=9), (LEAF, "depth", "labels")),
        ("finished", lambda m: m["attributes"].update(unit_tokens=6), (LEAF, "finished", "ledger")),
    ],
)  # fmt: skip
def test_metadata_that_breaks_the_schema(store, node, change, finding):
    edit(store, f"{LEAF}/{node}".rstrip("/"), change)
    assert finding in checks(store)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("layer", [0, 2, 1, 3]),
        ("layer", [0.0, 1.0, 2.0, 3.0]),
        ("token", list(range(23, -1, -1))),
        ("split", [0] * 12 + [2] * 12),
        ("position", [-1] * 24),
        ("is_special", [0] * 24),
        ("model", ["other"]),
    ],
)
def test_labels_that_break_the_schema(store, name, values):
    group = zarr.open_group(str(store), path=LEAF, mode="a", use_consolidated=False)
    dims = group[name].metadata.dimension_names
    array = group.create_array(
        name, data=np.array(values, dtype=object if name == "model" else None), overwrite=True,
        dimension_names=dims,
    ) if name != "model" else group[name]  # fmt: skip
    if name == "model":
        array[...] = np.array(values, dtype=object)
    assert (LEAF, name, "labels") in checks(store)


def test_missing_variables_labels_and_strange_leaves(store):
    group = zarr.open_group(str(store), mode="a", use_consolidated=False)
    del group[f"{LEAF}/hidden"], group[f"{LEAF}/document"]
    group.create_array("tiny/loose", shape=(2,), dtype="f4")
    group.create_group("tiny/attention")
    assert {
        (LEAF, "hidden", "schema"), (LEAF, "document", "labels"), ("tiny", "loose", "place"),
        ("tiny/attention", "", "ledger"), ("", "", "root"),
    } <= checks(store)  # fmt: skip


def test_a_root_that_no_longer_lists_what_is_there(store):
    edit(store, "", lambda m: m["consolidated_metadata"]["metadata"].popitem())
    assert checks(store) == {("", "", "root")}


def test_bad_arguments(store, tmp_path):
    with pytest.raises(ValueError, match="sample=0"):
        verify_study(store, sample=0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        verify_study(tmp_path / "nowhere")
