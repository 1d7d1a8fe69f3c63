"""Other people's dumps: every format gives the same cube, read a run at a time, or says why not."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
import zarr
from safetensors.torch import save_file

from geomstats_lm import dumps, selection
from geomstats_lm.cube import SettingsError, has_leaf
from geomstats_lm.dumps import contiguous, open_dump
from geomstats_lm.import_activations import import_activations
from geomstats_lm.verify import verify_study
from tests.cube_samples import contents

room = sys.modules[import_activations.__module__]  # the package's name for it is the verb

N_LAYERS, N_TOKENS, DIM, LENGTH = 3, 60, 6, 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(selection, "CHUNK_BYTES", (4 * LENGTH * DIM * 4,) * 2)


@pytest.fixture
def states():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N_LAYERS + 1, N_TOKENS, DIM)).astype(np.float32)


def table(**columns):
    """Twelve sequences of six documents; the evaluation documents are scattered among them."""
    sequence = np.arange(N_TOKENS) // LENGTH
    document = sequence // 2
    return pd.DataFrame(
        {
            "document": document, "sequence": sequence, "position": np.arange(N_TOKENS) % LENGTH,
            "token_id": np.arange(N_TOKENS) % 7, "split": np.isin(document, (0, 3)).astype(int),
            **columns,
        }
    )  # fmt: skip


def layer_names(kind, states):
    return {f"blocks.{number}.{kind}": states[number] for number in range(len(states))}


def npy(folder, states):
    np.save(folder / "dump.npy", states)
    return folder / "dump.npy"


def npy_fortran(folder, states):
    np.save(folder / "dump.npy", np.asfortranarray(states))
    return folder / "dump.npy"


def npz(folder, states):
    np.savez(folder / "dump.npz", states)
    return folder / "dump.npz"


def npz_compressed(folder, states):
    np.savez_compressed(folder / "dump.npz", states)
    return folder / "dump.npz"


def npz_by_layer(folder, states):
    np.savez(folder / "dump.npz", **layer_names("out", states))
    return folder / "dump.npz"


def safetensors(folder, states):
    save_file({"hidden": torch.from_numpy(states)}, folder / "dump.safetensors")
    return folder / "dump.safetensors"


def safetensors_by_layer(folder, states):
    named = {n: torch.from_numpy(v.copy()) for n, v in layer_names("out", states).items()}
    save_file(named, folder / "dump.safetensors")
    return folder / "dump.safetensors"


def torch_tensor(folder, states):
    torch.save(torch.from_numpy(states), folder / "dump.pt")
    return folder / "dump.pt"


def torch_list(folder, states):
    torch.save([torch.from_numpy(s.copy()) for s in states], folder / "dump.pth")
    return folder / "dump.pth"


def torch_by_layer_in_the_old_format(folder, states):
    torch.save(
        {i: torch.from_numpy(s.copy()) for i, s in enumerate(states)}, folder / "dump.pt",
        _use_new_zipfile_serialization=False,
    )  # fmt: skip
    return folder / "dump.pt"


def zarr_array(folder, states):
    zarr.create_array(str(folder / "dump.zarr"), data=states, chunks=(1, 7, DIM))
    return folder / "dump.zarr"


def zarr_of_version_2(folder, states):
    zarr.create_array(str(folder / "dump.zarr"), data=states, zarr_format=2)
    return folder / "dump.zarr"


def folder_of_layers(folder, states):
    (folder / "dump").mkdir()
    for number, values in enumerate(states):
        np.save(folder / f"dump/layer_{number}.npy", values)
    return folder / "dump"


def list_of_layers(folder, states):
    names = [folder / f"{name}.npy" for name in ("embedding", "first", "second", "third")]
    for name, values in zip(names, states):
        np.save(name, values)
    return names


FORMATS = [
    npy, npy_fortran, npz, npz_compressed, npz_by_layer, safetensors, safetensors_by_layer,
    torch_tensor, torch_list, torch_by_layer_in_the_old_format, zarr_array, zarr_of_version_2,
    folder_of_layers, list_of_layers,
]  # fmt: skip


def bring(source, store, labels=None, **how):
    labels = table() if labels is None else labels
    return import_activations(source, labels, store, model="org/Theirs", progress=False, **how)


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_labelled_cube(tmp_path, states, write):
    cube = bring(write(tmp_path, states), tmp_path / "study")
    order = np.argsort(table()["split"], kind="stable")
    assert cube.hidden.dims == ("model", "layer", "token", "dim")
    np.testing.assert_array_equal(cube.hidden.values[0], states[:, order])
    assert cube.layer.values.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(cube.depth, np.arange(4) / 3)
    np.testing.assert_array_equal(cube.document, table()["document"][order])
    np.testing.assert_array_equal(cube.split, np.sort(table()["split"]))
    assert cube.split.dtype == np.int8 and cube.document.dtype == np.int32
    assert cube.attrs["model_name"] == "org/Theirs" and cube.attrs["window_length"] == LENGTH
    assert set(cube.hidden.chunksizes["token"]) == {4 * LENGTH}
    assert verify_study(tmp_path / "study", sample=None, quiet=True).empty


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float64"])
def test_dtypes_of_dumps(tmp_path, states, given):
    tensor = torch.from_numpy(states).to(getattr(torch, given))
    save_file({"hidden": tensor}, tmp_path / "dump.safetensors")
    torch.save(tensor, tmp_path / "dump.pt")
    order = np.argsort(table()["split"], kind="stable")
    expected = tensor.float().numpy()[:, order]
    for number, name in enumerate(("dump.safetensors", "dump.pt")):
        cube = bring(tmp_path / name, tmp_path / str(number))
        np.testing.assert_array_equal(cube.hidden.values[0], expected)


def test_nothing_but_the_run_being_copied_is_read(tmp_path, states, monkeypatch):
    source, seen = npy(tmp_path, states), []

    def watched(source, array, stack):
        return [
            layer._replace(
                read=lambda a, b, layer=layer: seen.append((b - a) * DIM) or layer.read(a, b)
            )
            for layer in open_dump(source, array, stack)
        ]

    monkeypatch.setattr(room, "open_dump", watched)
    bring(source, tmp_path / "study")
    assert max(seen) <= 4 * LENGTH * DIM and sum(seen) == states.size


@pytest.mark.parametrize("write", [npy, npz, safetensors, torch_tensor])
def test_opening_maps_files_and_does_not_load_them(tmp_path, write):
    """64 MB of states, of which one token is read."""
    import tracemalloc

    large = np.zeros((2, 8192, 1024), dtype=np.float32)
    source = write(tmp_path, large)
    tracemalloc.start()
    with ExitStack() as stack:
        layers = open_dump(source, None, stack)
        assert layers[1].read(5, 6).shape == (1, 1024)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_layer_numbers_in_names_and_by_hand(tmp_path, states):
    (tmp_path / "dump").mkdir()
    for number, values in zip((2, 10, 4), states):  # 10 sorts after 4, not before
        np.save(tmp_path / f"dump/run7_layer{number}.npy", values)
    cube = bring(tmp_path / "dump", tmp_path / "named", n_layers=12)
    order = np.argsort(table()["split"], kind="stable")
    assert cube.layer.values.tolist() == [2, 4, 10] and cube.attrs["n_layers"] == 12
    np.testing.assert_array_equal(cube.depth, np.array([2, 4, 10]) / 12)
    np.testing.assert_array_equal(cube.hidden.sel(layer=10).values[0], states[1, order])
    cube = bring(npy(tmp_path, states), tmp_path / "given", layers=[0, 3, 6, 9])
    assert cube.layer.values.tolist() == [0, 3, 6, 9]


def test_one_array_of_several(tmp_path, states):
    np.savez(tmp_path / "dump.npz", hidden=states, attention=np.zeros((3, 4)))
    cube = bring(tmp_path / "dump.npz", tmp_path / "study", array="hidden")
    assert cube.sizes["layer"] == 4
    with pytest.raises(ValueError, match=r"dump.npz holds hidden: \(4, 60, 6\), attention"):
        bring(tmp_path / "dump.npz", tmp_path / "other")
    with pytest.raises(ValueError, match=r"array='states'.*\['hidden', 'attention'\]"):
        bring(tmp_path / "dump.npz", tmp_path / "other", array="states")


def test_few_labels_are_completed(tmp_path, states):
    labels = pd.DataFrame({"document": np.arange(N_TOKENS) // 10})
    cube = bring(npy(tmp_path, states), tmp_path / "study", labels)
    assert set(np.unique(cube.split)) == {0, 1} and (np.diff(cube.split) >= 0).all()
    share = cube.document.where(cube.split == 1, drop=True)
    assert len(np.unique(share)) == 2  # a third of six documents
    np.testing.assert_array_equal(cube.position, np.arange(N_TOKENS) % 10)
    assert (cube.token_id == -1).all() and not cube.is_special.any()
    again = bring(npy(tmp_path, states), tmp_path / "again", labels)
    xr.testing.assert_identical(again.load(), cube.load())
    other = bring(npy(tmp_path, states), tmp_path / "other", labels, seed=5, evaluation_share=0.5)
    assert len(np.unique(other.document[other.split == 1])) == 3


def test_further_columns_losses_and_csv(tmp_path, states):
    loss = np.linspace(0, 1, N_TOKENS)
    loss[LENGTH - 1 :: LENGTH] = np.nan
    labels = table(loss=loss, part_of_speech=np.arange(N_TOKENS) % 3)
    labels.to_csv(tmp_path / "labels.csv", index=False)
    cube = bring(npy(tmp_path, states), tmp_path / "study", tmp_path / "labels.csv")
    order = np.argsort(labels["split"], kind="stable")
    np.testing.assert_allclose(cube.loss[0], loss[order].astype(np.float32))
    assert cube.part_of_speech.dims == ("token",)


def test_sequences_of_different_lengths(tmp_path, states):
    labels = pd.DataFrame({"document": np.repeat([0, 1, 2, 3], [7, 23, 20, 10])})
    cube = bring(npy(tmp_path, states), tmp_path / "study", labels)
    assert "window_length" not in cube.attrs
    assert sorted(np.unique(cube.sequence, return_counts=True)[1]) == [7, 10, 20, 23]
    order = np.argsort(np.isin(labels["document"], cube.document[cube.split == 1]), kind="stable")
    np.testing.assert_array_equal(cube.hidden.values[0], states[:, order])


def test_an_import_that_stopped_carries_on(tmp_path, states, monkeypatch):
    source = npy(tmp_path, states)
    bring(source, tmp_path / "whole")
    write, calls = room.write_unit, []

    def failing(*arguments):
        calls.append(arguments[3])
        if len(calls) == 6:
            raise OSError("the cable was pulled")
        write(*arguments)

    monkeypatch.setattr(room, "write_unit", failing)
    with pytest.raises(OSError, match="cable"):
        bring(source, tmp_path / "torn")
    assert not has_leaf(tmp_path / "torn", "org-theirs", "activations")
    bring(source, tmp_path / "torn")
    assert len(calls) == 6 + 12 - 5
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")
    with pytest.raises(SettingsError, match="labels: stored"):
        bring(source, tmp_path / "torn", table(token_id=np.zeros(N_TOKENS, int)))


def bad_npy(values):
    def write(folder):
        np.save(folder / "bad.npy", values)
        return folder / "bad.npy"

    return write


def bad_layers(*shapes, dtypes=("float32", "float32")):
    def write(folder):
        (folder / "bad").mkdir()
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes)):
            np.save(folder / f"bad/layer{number}.npy", np.zeros(shape, dtype))
        return folder / "bad"

    return write


def bad_bytes(name):
    def write(folder):
        (folder / name).write_bytes(b"this is no array" * 9)
        return folder / name

    return write


def infinite(folder):
    values = np.zeros((2, N_TOKENS, DIM), np.float32)
    values[1, 7, 2] = np.inf
    return bad_npy(values)(folder)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (bad_npy(np.zeros((2, 59, DIM), np.float32)), r"bad.npy has 59 tokens, the labels have 60"),
        (bad_npy(np.zeros((2, N_TOKENS, DIM), np.int64)), r"bad.npy is int64; accepted"),
        (bad_npy(np.zeros(5, np.float32)), r"bad.npy holds bad: \(5,\)"),
        (bad_layers((60, 6), (60, 7)), r"layer1.npy is float32 \(60, 7\), but .*layer0.npy"),
        (bad_layers((60, 6), (60, 6), dtypes=("float32", "float16")), r"layer1.npy is float16"),
        (bad_layers((60, 6), (2, 60, 6)), r"layer1.npy has shape \(2, 60, 6\), not \(token, dim\)"),
        (infinite, r"bad.npy \(layer 1\) is not finite in 1 tokens"),
        (bad_bytes("bad.npy"), "bad.npy is no array"),
        (bad_bytes("bad.safetensors"), "bad.safetensors is no safetensors"),
        (bad_bytes("bad.pt"), "bad.pt holds no plain tensors"),
        (bad_bytes("bad.npz"), "bad.npz is no"),
        (bad_bytes("bad.xlsx"), "bad.xlsx is none of .npy"),
    ],
)
def test_files_that_are_refused_are_named(tmp_path, write, says):
    with pytest.raises(ValueError, match=says):
        bring(write(tmp_path), tmp_path / "study")


def test_missing_files_are_named(tmp_path):
    for name in ("nothing.npy", "nothing.zarr"):
        with pytest.raises(FileNotFoundError, match=name):
            bring(tmp_path / name, tmp_path / "study")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no \.npy"):
        bring(tmp_path / "empty", tmp_path / "study")
    with pytest.raises(FileNotFoundError, match=r"labels\.csv"):
        bring(tmp_path / "empty", tmp_path / "study", tmp_path / "labels.csv")


def test_tensors_that_would_run_code_are_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"module.pt holds no plain tensors"):
        bring(tmp_path / "module.pt", tmp_path / "study")


@pytest.mark.parametrize(
    ("labels", "how", "says"),
    [
        (table().drop(columns="document"), {}, "'document' is needed"),
        (table(word=["a"] * N_TOKENS), {}, r"columns \['word'\] hold text"),
        (table(split=np.full(N_TOKENS, 2)), {}, "split is 0"),
        (None, {"layers": [0, 1]}, "the dump has 4 layers"),
        (None, {"layers": [0, 2, 1, 3]}, "ascending"),
        (None, {"n_layers": 2}, "there is a layer 3"),
        (None, {"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_labels_and_arguments_that_are_refused(tmp_path, states, labels, how, says):
    with pytest.raises(ValueError, match=says):
        bring(npy(tmp_path, states), tmp_path / "study", labels, **how)


def test_names_that_do_not_number_the_layers(tmp_path, states):
    (tmp_path / "dump").mkdir()
    for name, values in zip(("a1", "b1"), states):
        np.save(tmp_path / f"dump/{name}.npy", values)
    with pytest.raises(ValueError, match=r"a1.npy.*layers="):
        bring(tmp_path / "dump", tmp_path / "study")


def test_runs_of_an_index():
    assert list(contiguous(np.array([3, 4, 5, 9, 1, 2]))) == [(3, 6), (9, 10), (1, 3)]
    assert dumps.SUFFIXES[0] == ".npy"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(contiguous(np.array([7]))) == [(7, 8)]
