"""What states does a model pass through on a text?

Runs the model over labelled windows and stores ``h_0 .. h_L`` and the next-token loss,
``loss[p] = -log softmax(logits[p])[token p + 1]``, chunk by chunk: what a chunk of tokens needs
is run, handed to a writer and forgotten, so that memory is bounded by the chunk.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.blocks import LanguageModel
from geomstats_lm.corpus import windows
from geomstats_lm.cube import (
    STORAGE_DTYPES,
    finish_leaf,
    open_leaf,
    prepare_leaf,
    progress_bar,
    token_runs,
    write_unit,
)
from geomstats_lm.models import longest_window, parameter_checksum
from geomstats_lm.selection import (
    chosen_layers,
    filter_name,
    kept_tokens,
    part_of,
    tokens_per_chunk,
)
from geomstats_lm.window_states import has_loss, run_windows


def extract(
    model: LanguageModel,
    corpus: pd.DataFrame | xr.Dataset,
    store: str | Path | None = None,
    *,
    length: int = 128,
    n_windows: int | tuple[int, int] | None = None,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    every: int | None = None,
    tokens: str | np.ndarray | None = None,
    dtype: str = "float32",
    batch_size: int = 16,
    part: tuple[int, int] | None = None,
    parts: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Extract a model's states on a corpus.

    Parameters
    ----------
    model : LanguageModel
        From :func:`geomstats_lm.load_model`.
    corpus : pandas.DataFrame or xarray.Dataset
        Documents from :func:`read_corpus`, or windows from :func:`windows`.
    store : str or Path, optional
        Study to write to; without one the result is kept in memory.
    length, n_windows, seed
        Passed to :func:`windows` when documents are given.
    layers : sequence of int, optional
        Layers to keep, of 0 (input of the first block) to L; all by default.  They keep their
        numbers.  An update needs two neighbours, ``l - 1`` and ``l``.
    every : int, optional
        Keep layers 0, ``every``, 2 ``every``, ...
    tokens : str or array of bool, optional
        Tokens to keep: a condition on their labels such as ``"position >= 8 and not is_special"``
        (as in :meth:`pandas.DataFrame.query`), or one flag a token.  The model reads whole windows
        all the same.
    dtype : {"float32", "float16", "bfloat16"}
        Storage dtype of the states.
    batch_size : int
        Windows per forward pass.
    part : (int, int), optional
        ``(i, n)``: do the i-th of n parts only, i = 1..n.  Parts are disjoint, adjacent runs of
        tokens of one store that any number of processes may fill at the same time.
    parts : bool
        Store also what mixer and MLP of every block contribute to the update, in the leaf
        ``parts`` (:func:`geomstats_lm.extract_parts`); needs a store.
    overwrite : bool
        Replace activations that were made with other settings.
    progress : bool
        Show a progress bar on a terminal.

    Returns
    -------
    xarray.Dataset
        ``hidden`` (model, layer, token, dim), layer 0..L, and ``loss`` (model, token) in nats, NaN
        at the last position of a window; lazy when stored.  Without ``loss`` where the model has
        no head that predicts the next token.  With ``part``, the tokens of that part.

    Raises
    ------
    ValueError
        If the windows do not suit the model, or a state is not finite.
    OverflowError
        If a state does not fit ``dtype``: layers, counts and the dtype that fits are named.
    SettingsError
        If the store holds activations of this model made with other settings.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_corpus, load_example
    >>> activations = extract(
    ...     load_example("gpt2"), example_corpus(), length=32, n_windows=(4, 2), progress=False
    ... )
    >>> dict(activations.hidden.sizes)
    {'model': 1, 'layer': 7, 'token': 192, 'dim': 192}
    """
    _check_arguments(dtype, batch_size, part, store, overwrite)
    if parts and (store is None or part is not None):
        raise ValueError("parts=True needs a store, and part=None")
    chosen = chosen_layers(model, layers, every)
    if isinstance(corpus, pd.DataFrame):
        corpus = windows(corpus, model.tokenizer, length=length, n_windows=n_windows, seed=seed)
    check_windows(model, corpus)
    kept = kept_tokens(corpus, tokens)
    template = activation_template(model, corpus, layers=chosen, kept=kept)
    ids = corpus.token_id.values.reshape(-1, int(corpus.attrs["window_length"]))
    runs = token_runs(len(kept), template.hidden.variable.chunksizes["token"][0])
    if store is None:
        result = template.map(lambda v: xr.full_like(v, np.nan).compute(), keep_attrs=True)
        with progress_bar(progress, len(kept), model.key) as bar:
            for start, stop in runs:
                states, loss = run_windows(model, ids, kept[start:stop], chosen, batch_size)
                result.hidden[0, :, start:stop] = states
                if loss is not None:
                    result.loss[0, start:stop] = loss
                bar.update(stop - start)
        return result
    settings = {
        "dtype": dtype,
        "layers": chosen,
        "model": template.attrs["parameter_checksum"],
        "n_tokens": len(kept),
        "split_seed": int(corpus.attrs.get("split_seed", -1)),
        "text": corpus.attrs.get("text_checksum", ""),
        "token_ids": zlib.crc32(np.ascontiguousarray(ids, dtype=np.int64).data),
        "tokens": filter_name(tokens, kept),
        "window_length": int(corpus.attrs["window_length"]),
    }
    since = time.time()
    finished = prepare_leaf(
        template, store, model.key, "activations", settings=settings,
        grid={"layer": [(0, len(chosen))], "token": runs}, overwrite=overwrite,
        dtypes={"hidden": dtype},
    )[0]  # fmt: skip
    mine = part_of(len(runs), part)
    _extract_units(model, ids, kept, chosen, batch_size, store, runs, mine, finished, progress)
    complete = finish_leaf(store, model.key, "activations", since=since)
    if part is None or complete:
        whole = open_leaf(store, model.key, "activations")
    else:
        whole = open_leaf(store, model.key, "activations", incomplete="ignore")
    if parts:
        from geomstats_lm.parts import extract_parts

        extract_parts(
            model, whole, batch_size=batch_size, store=store, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    if part is None:
        return whole
    edges = [runs[i] for i in mine]
    return whole.isel(token=slice(edges[0][0], edges[-1][1]) if edges else slice(0))


def _extract_units(
    model: LanguageModel,
    ids: np.ndarray,
    kept: np.ndarray,
    layers: list[int],
    batch_size: int,
    store: str | Path,
    runs: list[tuple[int, int]],
    mine: np.ndarray,
    finished: np.ndarray,
    progress: bool,
) -> None:
    """Run and write the unfinished units, the next one being run while the last is written."""
    sizes = {int(i): runs[i][1] - runs[i][0] for i in mine}
    done = sum(n for i, n in sizes.items() if finished[i])
    token_bytes = 4 * (len(layers) * model.dim + 1)
    with (
        progress_bar(progress, sum(sizes.values()), model.key, initial=done) as bar,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        pending: Future[None] | None = None
        # one is filled while what is in the other is written
        most = max(sizes.values(), default=0) * len(layers) * model.dim
        buffers = [np.empty(most, dtype=np.float32) for _ in range(2)]
        for number in (i for i in sizes if not finished[i]):
            start, stop = runs[number]
            buffers.reverse()
            states, loss = run_windows(model, ids, kept[start:stop], layers, batch_size, buffers[0])
            if pending is not None:
                pending.result()
            pending = writer.submit(
                _write, str(store), model.key, number, start, stop, states, loss
            )
            bar.update(stop - start)
            bar.set_postfix_str(f"{(bar.n - done) * token_bytes / 1e6:,.0f} MB")
        if pending is not None:
            pending.result()


def _write(
    store: str, key: str, number: int, start: int, stop: int,
    states: np.ndarray, loss: np.ndarray | None,
) -> None:  # fmt: skip
    every, run = slice(None), slice(start, stop)
    parts, regions = {"hidden": states[None]}, {"hidden": (every, every, run, every)}
    if loss is not None:
        parts["loss"], regions["loss"] = loss[None], (every, run)  # type: ignore[assignment]
    write_unit(store, key, "activations", (0, number), parts, regions)


def activation_template(
    model: LanguageModel,
    corpus: xr.Dataset,
    *,
    layers: Sequence[int] | None = None,
    kept: np.ndarray | None = None,
) -> xr.Dataset:
    """Labels, shapes and chunks of the activations of windows, with no values.

    Parameters
    ----------
    model : LanguageModel
    corpus : xarray.Dataset
        From :func:`windows`.
    layers : sequence of int, optional
        Layers kept; 0..L by default.
    kept : array of int, optional
        Which tokens of the windows are kept; all by default.

    Returns
    -------
    xarray.Dataset
    """
    depth, length = model.n_layers, int(corpus.attrs["window_length"])
    numbers = np.arange(depth + 1) if layers is None else np.asarray(layers, dtype=np.int64)
    left_out = 0
    if kept is not None and len(kept) < corpus.sizes["token"]:
        left_out = corpus.sizes["token"] - len(kept)
        corpus = corpus.isel(token=kept)
    n_tokens = corpus.sizes["token"]
    run = tokens_per_chunk(corpus, length, len(numbers), model.dim)
    coords = {
        "model": [model.key],
        "layer": numbers,
        "depth": ("layer", numbers / depth),
        **corpus.coords,
    }
    variables: dict[str, Any] = {
        "hidden": (
            ("model", "layer", "token", "dim"),
            da.zeros((1, len(numbers), n_tokens, model.dim), chunks=(1, 1, run, model.dim),
                     dtype=np.float32),
            {"long_name": "state after block `layer` (0: input of the first block)"},
        )
    }  # fmt: skip
    if has_loss(model):
        variables["loss"] = (
            ("model", "token"),
            da.zeros((1, n_tokens), chunks=(1, run), dtype=np.float32),
            {"long_name": "loss of predicting the next token", "units": "nat"},
        )
    attrs = {
        **corpus.attrs,
        **model.attrs,
        "model_name": model.name,
        "model_key": model.key,
        "n_layers": depth,
        "n_tokens_left_out": left_out,
        "vocabulary": model.vocabulary,
        "parameter_checksum": parameter_checksum(model),
        "software": ", ".join(
            f"{p} {_version(p)}" for p in ("geomstats_lm", "torch", "transformers", "zarr")
        ),
    }
    return xr.Dataset(variables, coords, attrs)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def _check_arguments(
    dtype: str,
    batch_size: int,
    part: tuple[int, int] | None,
    store: str | Path | None,
    overwrite: bool,
) -> None:
    if dtype not in STORAGE_DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(STORAGE_DTYPES)}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: accepted are 1, 2, ...")
    if part is None:
        return
    if len(part) != 2 or not 1 <= part[0] <= part[1]:
        raise ValueError(f"part={part}: accepted are (i, n) with i = 1..n, such as (2, 4)")
    if store is None:
        raise ValueError("part: parts are put together in a store, so pass store=")
    if overwrite:
        raise ValueError(
            "overwrite: a part must not remove what other parts wrote; remove the activations "
            "first, or write to another store"
        )


def check_windows(model: LanguageModel, corpus: xr.Dataset) -> None:
    if not isinstance(corpus, xr.Dataset) or "token_id" not in corpus.coords:
        raise TypeError(f"corpus: accepted are documents or windows, given {type(corpus).__name__}")
    length = int(corpus.attrs["window_length"])
    longest = longest_window(model)
    if length > longest:
        raise ValueError(f"length={length}: {model.name} reads at most {longest} tokens")
    embeddings: Any = model.model.get_input_embeddings()  # type: ignore[operator]
    largest = int(corpus.token_id.max())
    if largest >= embeddings.weight.shape[0]:
        raise ValueError(
            f"corpus: token id {largest} is outside the vocabulary of {model.name} "
            f"({embeddings.weight.shape[0]}); were the windows cut with its tokenizer?"
        )
