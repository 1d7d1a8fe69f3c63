"""Extraction: the states of the model's own forward, whichever part is kept, by any writers."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import xarray as xr

from geomstats_lm import selection
from geomstats_lm.cube import IncompleteError, SettingsError, has_leaf, open_leaf, settings_of
from geomstats_lm.extract import extract
from geomstats_lm.selection import run_of_windows
from geomstats_lm.window_states import next_token_loss
from tests.cube_samples import contents
from tests.model_samples import random_windows, tiny_bert, tiny_gpt2

extract_room = sys.modules[extract.__module__]  # the package's name for it is the verb


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of two windows, so that twelve windows are six units."""
    monkeypatch.setattr(selection, "CHUNK_BYTES", (2 * 8 * 16 * 4, 2 * 8 * 16 * 4))


@pytest.fixture(scope="module")
def model():
    return tiny_gpt2()


@pytest.fixture
def store(tmp_path):
    return tmp_path / "study.zarr"


def run(model, store=None, corpus=None, **how):
    corpus = random_windows() if corpus is None else corpus
    return extract(model, corpus, store, progress=False, **{"batch_size": 3, **how})


@pytest.fixture(scope="module")
def whole(model):
    """Everything, from one forward pass of the bare transformers model."""
    corpus = random_windows()
    ids = torch.from_numpy(corpus.token_id.values.reshape(-1, 8).astype(np.int64))
    with torch.no_grad():
        output = model.model(input_ids=ids, output_hidden_states=True, labels=None)
    states = torch.stack(output.hidden_states[:-1])  # the last one has the final norm on it
    logp = output.logits.log_softmax(-1)
    loss = -logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    loss = torch.cat([loss, torch.full((len(ids), 1), torch.nan)], dim=1)
    return states.reshape(len(states), -1, 16).numpy(), loss.reshape(-1).numpy()


# --- what is stored -------------------------------------------------------------------------


def test_states_and_loss_are_those_of_the_forward_pass(model, store, whole):
    states, loss = whole
    for made in (run(model), run(model, store)):
        assert made.hidden.dims == ("model", "layer", "token", "dim")
        # batches of another size round differently in the last bit or two of float32
        np.testing.assert_allclose(made.hidden.values[0, :-1], states, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(made.loss.values[0], loss, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(np.isnan(made.loss[0]), made.position.values == 7)
        final = model.model.transformer.ln_f(torch.from_numpy(made.hidden.values[0, -1]))
        logp = model.model.lm_head(final).log_softmax(-1)
        follows = torch.from_numpy(np.roll(made.token_id.values, -1).astype(np.int64))
        again = -logp[torch.arange(96), follows].numpy()
        keep = made.position.values < 7
        np.testing.assert_allclose(again[keep], loss[keep], rtol=1e-4, atol=1e-5)


def test_the_leaf_says_what_made_it(model, store):
    made = run(model, store)
    assert {"model_name", "parameter_checksum", "text_checksum", "software"} <= set(made.attrs)
    assert made.attrs["n_layers"] == 4 and made.attrs["vocabulary"] == 60
    assert made.layer.dtype.kind == "i" and made.layer.values.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(made.depth, np.arange(5) / 4)
    xr.testing.assert_equal(
        made.drop_vars(["model", "layer", "depth"]).coords.to_dataset(),
        random_windows().coords.to_dataset(),
    )
    assert made.hidden.chunks == ((1,), (1,) * 5, (16,) * 6, (16,))


def test_models_without_a_head_and_encoders_have_states_and_no_loss(tmp_path):
    for number, model in enumerate([tiny_gpt2(head=False), tiny_bert(), tiny_bert(head=True)]):
        made = run(model, tmp_path / str(number))
        assert set(made.data_vars) == {"hidden"}
        ids = torch.from_numpy(made.token_id.values.reshape(-1, 8).astype(np.int64))
        with torch.no_grad():
            states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
        np.testing.assert_allclose(
            made.hidden.values[0, 1], states[1].reshape(-1, 16).numpy(), rtol=1e-4, atol=1e-6
        )
        assert set(run(model).data_vars) == {"hidden"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_cubes(model, store, whole, dtype):
    made = run(model, store, dtype=dtype)
    assert made.hidden.dtype == np.float32
    step = 2.0**-11 if dtype == "float16" else 2.0**-8
    expected = run(model).hidden.values
    assert (np.abs(made.hidden.values - expected) <= step * np.abs(expected) + 2.0**-25).all()


def test_overflow_names_the_layer(store):
    model = tiny_gpt2()
    with torch.no_grad():  # the second block adds a constant that float16 cannot hold
        model.blocks[1].mlp.c_proj.bias[3] = 1e5
    with pytest.raises(OverflowError) as caught:
        run(model, store, dtype="float16")
    assert "of 'hidden' overflow float16" in str(caught.value)
    assert "layer 2: 16, layer 3: 16, layer 4: 16" in str(caught.value)
    assert "store as bfloat16 or float32" in str(caught.value)
    assert not has_leaf(store, "tiny", "activations")


def test_states_that_are_not_finite_are_refused_by_layer(store):
    model = tiny_gpt2()
    with torch.no_grad():
        model.blocks[2].mlp.c_proj.bias[0] = torch.inf
    with pytest.raises(ValueError, match=r"layers \[3, 4\] are not finite"):
        run(model, store)
    with pytest.raises(ValueError, match=r"layers \[3, 4\]"):
        run(model)


# --- part of a model, part of the tokens ----------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"layers": [3, 1, 2]}, [1, 2, 3]),
        ({"layers": [4]}, [4]),
        ({"every": 2}, [0, 2, 4]),
        ({"every": 3}, [0, 3]),
    ],
)
def test_chosen_layers_keep_their_numbers(model, store, how, kept):
    full = run(model)
    for made in (run(model, **how), run(model, store, **how)):
        assert made.layer.values.tolist() == kept
        np.testing.assert_array_equal(made.depth, np.array(kept) / 4)
        assert made.attrs["n_layers"] == 4
        xr.testing.assert_equal(made.load(), full.sel(layer=kept))
    with pytest.raises(SettingsError, match="layers: stored"):
        run(model, store)


@pytest.mark.parametrize(
    "condition",
    ["position >= 3", "position > 0 and not is_special and split == 1", "token % 5 == 2"],
)
def test_chosen_tokens_are_read_in_their_windows(model, store, condition):
    full = run(model)
    flags = full.coords.to_dataset().reset_coords()[["position", "is_special", "split"]]
    flags = flags.to_dataframe().reset_index().eval(condition).values
    for made in (
        run(model, tokens=condition),
        run(model, store, tokens=condition),
        run(model, tokens=flags),
    ):
        xr.testing.assert_allclose(made.load(), full.isel(token=flags), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(made.token, np.flatnonzero(flags))
        assert made.attrs["n_tokens_left_out"] == (~flags).sum()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"layers": [5]}, r"layers=\[5\].*0\.\.4"),
        ({"layers": []}, r"layers=\[\]"),
        ({"layers": [-1]}, r"0\.\.4"),
        ({"layers": [1], "every": 2}, "one of them"),
        ({"every": 0}, "every=0"),
        ({"tokens": "colour == 3"}, "colour == 3.*position"),
        ({"tokens": "position > 99"}, "keeps no token"),
        ({"tokens": "position + 1"}, "true or false"),
        ({"tokens": np.ones(5, bool)}, r"96 tokens.*\(5,\)"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"part": (1, 2)}, "store="),
    ],
)
def test_bad_arguments_are_named(model, how, says):
    with pytest.raises(ValueError, match=says):
        run(model, **how)


def test_windows_that_do_not_suit_the_model_are_refused(model):
    with pytest.raises(ValueError, match=r"length=40.*at most 32"):
        run(model, corpus=random_windows(4, 40))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        run(model, corpus=random_windows(vocabulary=500))
    with pytest.raises(TypeError, match="list"):
        run(model, corpus=["text"])


@pytest.mark.parametrize("part", [(0, 2), (3, 2), (1,), (1, 2, 3)])
def test_parts_that_are_none_are_refused(model, store, part):
    with pytest.raises(ValueError, match="part="):
        run(model, store, part=part)


# --- resuming and parts ---------------------------------------------------------------------


def test_an_exception_half_way_costs_no_finished_unit(model, tmp_path, monkeypatch):
    run(model, tmp_path / "whole")
    forward, calls = extract_room.run_windows, []

    def failing(*arguments):
        calls.append(arguments[2][0])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(extract_room, "run_windows", failing)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "torn")
    with pytest.raises(IncompleteError, match="3 of 6 units"):
        open_leaf(tmp_path / "torn", "tiny", "activations")
    run(model, tmp_path / "torn")
    assert calls[4:] == [48, 64, 80]  # the three units before were written and stay
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")
    run(model, tmp_path / "torn")
    assert len(calls) == 7


def test_other_settings_are_refused_by_name(model, store):
    made = run(model, store)
    assert settings_of(made)["layers"] == [0, 1, 2, 3, 4]
    with pytest.raises(SettingsError, match="dtype: stored 'float32', now 'float16'"):
        run(model, store, dtype="float16")
    with pytest.raises(SettingsError, match="token_ids"):
        run(model, store, corpus=random_windows(seed=1))
    with pytest.raises(SettingsError, match="model: stored"):
        run(tiny_gpt2(seed=1), store)
    again = run(model, store, dtype="float16", overwrite=True)
    assert settings_of(again)["dtype"] == "float16"


def test_parts_are_disjoint_adjacent_and_together_the_whole(model, tmp_path):
    run(model, tmp_path / "whole")
    parts = [run(model, tmp_path / "parts", part=(i, 4)) for i in (3, 1, 4, 2)]
    tokens = np.concatenate([parts[i].token.values for i in (1, 3, 0, 2)])
    np.testing.assert_array_equal(tokens, np.arange(96))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    xr.testing.assert_equal(parts[0].load(), run(model).isel(token=parts[0].token.values))


def test_more_parts_than_units_leave_some_empty(model, store):
    sizes = [run(model, store, part=(i, 8)).sizes["token"] for i in range(1, 9)]
    assert sum(sizes) == 96 and sizes[-1] == 0
    assert has_leaf(store, "tiny", "activations")


def test_a_part_overwrites_nothing(model, store):
    run(model, store)
    with pytest.raises(ValueError, match="overwrite"):
        run(model, store, part=(1, 2), overwrite=True)


def test_threads_that_create_one_leaf_at_once_lose_nothing(model, tmp_path):
    run(model, tmp_path / "whole")
    errors: list = []
    models = {i: tiny_gpt2() for i in range(1, 5)}  # one model is not read by two threads at once
    start = threading.Barrier(4)

    def worker(number):
        try:
            start.wait()
            run(models[number], tmp_path / "shared", part=(number, 4))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


WRITER = """
import sys, time
from pathlib import Path
from geomstats_lm import selection
from geomstats_lm.extract import extract
from tests.model_samples import random_windows, tiny_gpt2
selection.CHUNK_BYTES = (2 * 8 * 16 * 4,) * 2
store, number, go = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
model, corpus = tiny_gpt2(), random_windows()
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
extract(model, corpus, store, part=(number, 3), batch_size=3, progress=False)
"""


def test_a_model_read_by_another_thread_is_noticed(model):
    def intrude(module, args, output):
        if not module.training:
            torch.nn.Module.__call__(model.blocks[1], *args)

    handle = model.blocks[0].register_forward_hook(intrude)
    try:
        with pytest.raises(RuntimeError, match="at the same time"):
            run(model)
    finally:
        handle.remove()


@pytest.mark.slow
def test_processes_fill_one_store_at_the_same_time(model, tmp_path):
    run(model, tmp_path / "whole")
    go = tmp_path / "go"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "shared"), str(number), str(go)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in (1, 2, 3)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
    go.touch()
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


# --- pieces ---------------------------------------------------------------------------------


def test_next_token_loss_against_the_definition():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator) * 3
    ids = torch.randint(0, 11, (3, 5), generator=generator)
    loss = next_token_loss(logits, ids)
    for row in range(3):
        assert torch.isnan(loss[row, -1])
        for p in range(4):
            expected = -torch.log_softmax(logits[row, p].double(), -1)[ids[row, p + 1]]
            assert abs(float(loss[row, p]) - float(expected)) < 1e-5  # float32 of values up to ten


@pytest.mark.parametrize("n_windows", [1, 7, 100, 5000])
@pytest.mark.parametrize("window_bytes", [100, 40_000, 3_000_000, 40_000_000])
def test_chunks_hold_whole_windows_of_a_sensible_size(monkeypatch, n_windows, window_bytes):
    monkeypatch.setattr(selection, "CHUNK_BYTES", (1 << 20, 16 << 20))
    run = run_of_windows(n_windows, window_bytes, align=n_windows * 2 // 3)
    assert 1 <= run <= n_windows
    assert run == 1 or run * window_bytes <= 16 << 20
    # a whole divisor of the reference windows may cost up to half of the least size
    assert 2 * run + 1 >= min(n_windows, (1 << 20) // window_bytes)


def test_progress_is_silent_where_nobody_watches(model, store, capsys):
    extract(model, random_windows(), store, batch_size=3, progress=True)
    said = capsys.readouterr()
    assert said.out == "" and said.err == ""


def test_progress_tells_tokens_bytes_and_rate_on_a_terminal(model, store, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    extract(model, random_windows(), store, batch_size=3, progress=True)
    said = capsys.readouterr().err
    assert "token/s" in said and "MB" in said and "96.0/96.0" in said.replace("96/", "96.0/")
