"""Chunks written and read as files are those that Zarr writes and reads."""

from __future__ import annotations

import numpy as np
import pytest
import zarr

from geomstats_lm.chunk_files import lazy_chunks, write_chunks
from geomstats_lm.cube import IncompleteError, open_leaf, write_leaf
from tests.cube_samples import activations, contents

FILLS = {"float32": np.nan, "float16": np.nan, "bool": False, "uint16": 0x7FC0, "int64": 0}


def arrays(folder, dtype, **how):
    """The same array twice: one for Zarr to fill, one for us."""
    made = {"shape": (3, 11, 5), "chunks": (1, 4, 5), "dtype": dtype, "fill_value": FILLS[dtype]}
    made |= {"compressors": None, "config": {"write_empty_chunks": True}} | how
    return [zarr.create_array(str(folder / name), **made) for name in ("zarr", "ours")]


@pytest.mark.parametrize("dtype", list(FILLS))
@pytest.mark.parametrize("how", [{}, {"compressors": "auto"}, {"shards": (3, 8, 5)}])
def test_the_same_files_as_zarrs(tmp_path, dtype, how):
    theirs, ours = arrays(tmp_path, dtype, **how)
    values = np.random.default_rng(0).normal(size=(3, 11, 5)).astype(dtype)
    values[1] = FILLS[dtype]  # a chunk of nothing but fill values
    theirs[...] = values
    for run in (slice(0, 4), slice(4, 8), slice(8, 11)):  # the last chunk is cut short
        region = (slice(0, 3), run, slice(None))
        write_chunks(ours, region, values[region])
    if not how.get("shards"):  # several writes to one shard lay it out otherwise
        assert contents(tmp_path / "ours") == contents(tmp_path / "zarr")
    np.testing.assert_array_equal(ours[...], values)
    lazy = lazy_chunks(theirs)
    assert (lazy is None) == bool(how)  # compressed and sharded arrays are read by Zarr
    if lazy is not None:
        assert lazy.chunks == ((1, 1, 1), (4, 4, 3), (5,)) and lazy.dtype == values.dtype
        np.testing.assert_array_equal(lazy.compute(), values)
        np.testing.assert_array_equal(lazy[1:, 3:9, ::2].compute(), values[1:, 3:9, ::2])


def test_part_of_a_chunk_leaves_the_rest(tmp_path):
    array = arrays(tmp_path, "float32")[1]
    write_chunks(array, (slice(0, 1), slice(0, 4), slice(None)), np.ones((1, 4, 5), np.float32))
    write_chunks(array, (slice(0, 1), slice(1, 3), slice(None)), np.zeros((1, 2, 5), np.float32))
    assert array[0, :4, 0].tolist() == [1, 0, 0, 1]


def test_chunks_lost_or_cut_short_after_opening_are_errors(tmp_path):
    write_leaf(activations(), tmp_path, "tiny", "activations", settings={}, progress=False)
    leaf = open_leaf(tmp_path, "tiny", "activations")
    file = tmp_path / "tiny/activations/hidden/c/0/2/1/0"
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(IncompleteError, match=r"c/0/2/1/0 holds 39 values, not 40"):
        leaf.hidden.load()
    file.unlink()
    leaf = leaf.isel(layer=[2])
    with pytest.raises(IncompleteError, match=r"c/0/2/1/0 is missing"):
        leaf.hidden.load()
    file.write_bytes(content)
    expected = activations().hidden.isel(layer=[2]).values
    np.testing.assert_array_equal(leaf.hidden.values, expected)


def test_a_leaf_opened_anew_is_not_taken_for_the_one_before(tmp_path):
    names = []
    for seed in (0, 1):
        write_leaf(
            activations(seed=seed), tmp_path, "tiny", "activations", settings={"seed": seed},
            overwrite=True, progress=False,
        )  # fmt: skip
        names.append(open_leaf(tmp_path, "tiny", "activations").hidden.data.name)
    assert names[0] != names[1]
