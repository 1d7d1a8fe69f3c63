"""What states does a model pass through on a text?

Runs the model over labelled windows and stores ``h_0 .. h_L`` and the next-token loss,
``loss[p] = -log softmax(logits[p])[token p + 1]``, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from geomstats_lm.blocks import LanguageModel, capture
from geomstats_lm.corpus import windows
from geomstats_lm.cube import (
    STORAGE_DTYPES,
    open_leaf,
    prepare_leaf,
    token_runs,
    write_unit,
)  # fmt: skip
from geomstats_lm.models import parameter_checksum

CHUNK_BYTES = (1 << 20, 16 << 20)  # least and most bytes of a chunk
CHUNKS_WANTED = 16  # per layer, so that a small cube still feeds several workers


def extract(
    model: LanguageModel,
    corpus: pd.DataFrame | xr.Dataset,
    store: str | Path | None = None,
    *,
    length: int = 128,
    n_windows: int | tuple[int, int] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    batch_size: int = 16,
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
    dtype : {"float32", "float16", "bfloat16"}
        Storage dtype of the states.
    batch_size : int
        Windows per forward pass.
    overwrite : bool
        Replace activations that were made with other settings.
    progress : bool
        Show a progress bar.

    Returns
    -------
    xarray.Dataset
        ``hidden`` (model, layer, token, dim), layer 0..L, and ``loss`` (model, token) in nats, NaN
        at the last position of a window; lazy when stored.

    Raises
    ------
    ValueError
        If the windows do not suit the model, or a state is not finite.
    OverflowError
        If a state does not fit ``dtype``.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_corpus, load_example
    >>> activations = extract(
    ...     load_example("gpt2"), example_corpus(), length=32, n_windows=(4, 2), progress=False
    ... )
    >>> dict(activations.hidden.sizes)
    {'model': 1, 'layer': 7, 'token': 192, 'dim': 192}
    """
    if dtype not in STORAGE_DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(STORAGE_DTYPES)}")
    if isinstance(corpus, pd.DataFrame):
        corpus = windows(corpus, model.tokenizer, length=length, n_windows=n_windows, seed=seed)
    _check_windows(model, corpus)
    template = activation_template(model, corpus)
    runs = token_runs(corpus.sizes["token"], template.hidden.chunksizes["token"][0])
    ids = corpus.token_id.values.reshape(-1, corpus.attrs["window_length"])
    if store is None:
        result = template.map(lambda v: xr.full_like(v, np.nan).compute(), keep_attrs=True)
        with tqdm(total=ids.size, unit="token", disable=not progress, leave=False) as bar:
            for start, stop in runs:
                states, loss = _run(model, ids, start, stop, batch_size)
                result.hidden[0, :, start:stop] = states
                result.loss[0, start:stop] = loss
                bar.update(stop - start)
        return result
    settings = {
        "dtype": dtype,
        "model": template.attrs["parameter_checksum"],
        "text": corpus.attrs.get("text_checksum", ""),
        "window_length": int(corpus.attrs["window_length"]),
        "n_tokens": int(corpus.sizes["token"]),
        "split_seed": int(corpus.attrs.get("split_seed", -1)),
    }
    grid = {"layer": [(0, model.n_layers + 1)], "token": runs}
    finished = prepare_leaf(
        template, store, model.key, "activations", settings=settings, grid=grid,
        overwrite=overwrite, dtypes={"hidden": dtype},
    )  # fmt: skip
    with tqdm(
        total=ids.size, unit="token", desc=f"{model.key} activations",
        initial=sum(b - a for done, (a, b) in zip(finished[0], runs) if done),
        disable=not progress, leave=False,
    ) as bar:  # fmt: skip
        for number in np.flatnonzero(~finished[0]):
            start, stop = runs[number]
            states, loss = _run(model, ids, start, stop, batch_size)
            tokens = slice(start, stop)
            write_unit(
                str(store), model.key, "activations", (0, int(number)),
                {"hidden": states[None], "loss": loss[None]},
                {
                    "hidden": (slice(None), slice(None), tokens, slice(None)),
                    "loss": (slice(None), tokens),
                },
            )  # fmt: skip
            bar.update(stop - start)
    return open_leaf(store, model.key, "activations")


def activation_template(model: LanguageModel, corpus: xr.Dataset) -> xr.Dataset:
    """Labels, shapes and chunks of the activations of windows, with no values.

    Parameters
    ----------
    model : LanguageModel
    corpus : xarray.Dataset
        From :func:`windows`.

    Returns
    -------
    xarray.Dataset
    """
    n_tokens, length = corpus.sizes["token"], int(corpus.attrs["window_length"])
    run = length * run_of_windows(
        n_tokens // length, length * model.dim * 4,
        align=int((corpus.split.values == 0).sum()) // length,
    )  # fmt: skip
    depth = model.n_layers
    coords = {
        "model": [model.key],
        "layer": np.arange(depth + 1),
        "depth": ("layer", np.arange(depth + 1) / depth),
        **corpus.coords,
    }
    hidden = da.zeros(
        (1, depth + 1, n_tokens, model.dim), chunks=(1, 1, run, model.dim), dtype=np.float32
    )
    loss = da.zeros((1, n_tokens), chunks=(1, run), dtype=np.float32)
    return xr.Dataset(
        {
            "hidden": (
                ("model", "layer", "token", "dim"),
                hidden,
                {"long_name": "state after block `layer` (0: input of the first block)"},
            ),
            "loss": (
                ("model", "token"),
                loss,
                {"long_name": "loss of predicting the next token", "units": "nat"},
            ),
        },
        coords,
        {
            **corpus.attrs,
            **model.attrs,
            "model_name": model.name,
            "model_key": model.key,
            "n_layers": depth,
            "vocabulary": model.vocabulary,
            "parameter_checksum": parameter_checksum(model),
            "software": ", ".join(
                f"{p} {_version(p)}" for p in ("geomstats_lm", "torch", "transformers", "zarr")
            ),
        },
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def run_of_windows(n_windows: int, window_bytes: int, align: int = 0) -> int:
    """How many whole windows one chunk holds.

    Between 1 and 16 MB a chunk, small cubes in about 16 runs; a number that divides ``align``
    windows where one is near, so that reference and evaluation tokens share no chunk.
    """
    least, most = CHUNK_BYTES
    wanted = min(max(n_windows * window_bytes / CHUNKS_WANTED, least), most)
    run = min(max(1, int(wanted // window_bytes)), n_windows)
    for divisor in range(run, run // 2, -1):
        if align and align % divisor == 0:
            return divisor
    return run


def _check_windows(model: LanguageModel, corpus: xr.Dataset) -> None:
    if not isinstance(corpus, xr.Dataset) or "token_id" not in corpus.coords:
        raise TypeError(f"corpus: accepted are documents or windows, given {type(corpus).__name__}")
    length = int(corpus.attrs["window_length"])
    config: Any = model.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if longest and length > longest:
        raise ValueError(f"length={length}: {model.name} reads at most {longest} tokens")
    embeddings: Any = model.model.get_input_embeddings()  # type: ignore[operator]
    largest = int(corpus.token_id.max())
    if largest >= embeddings.weight.shape[0]:
        raise ValueError(
            f"corpus: token id {largest} is outside the vocabulary of {model.name} "
            f"({embeddings.weight.shape[0]}); were the windows cut with its tokenizer?"
        )


def _run(
    model: LanguageModel, ids: np.ndarray, start: int, stop: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """States (layer, token, dim) and loss (token) of the windows within tokens start..stop."""
    length = ids.shape[1]
    states = np.empty((model.n_layers + 1, stop - start, model.dim), dtype=np.float32)
    loss = np.full(stop - start, np.nan, dtype=np.float32)
    for begin, end in _batches(start // length, stop // length, batch_size):
        batch = torch.from_numpy(ids[begin:end].astype(np.int64))
        captured, logits = capture(model, batch)
        place = slice(begin * length - start, end * length - start)
        for layer, state in enumerate(captured):
            states[layer, place] = state.reshape(-1, model.dim).float().cpu().numpy()
        if logits is not None:
            loss[place] = next_token_loss(logits, batch.to(logits.device)).cpu().numpy().ravel()
    bad = [layer for layer in range(len(states)) if not np.isfinite(states[layer]).all()]
    if bad:
        raise ValueError(
            f"{model.name}: states of layers {bad} are not finite (model dtype "
            f"{model.attrs['model_dtype']}); load it with dtype='float32'"
        )
    return states, loss


def _batches(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, size):
        yield begin, min(begin + size, stop)


def next_token_loss(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Loss of predicting the next token, in nats; NaN at the last position.

    Parameters
    ----------
    logits : torch.Tensor, shape (batch, position, vocabulary)
    input_ids : torch.Tensor, shape (batch, position)

    Returns
    -------
    torch.Tensor, shape (batch, position)
    """
    loss = torch.full(input_ids.shape, torch.nan, device=logits.device)
    for row in range(len(logits)):  # one row at a time: large vocabularies stay in bounds
        loss[row, :-1] = cross_entropy(
            logits[row, :-1].float(), input_ids[row, 1:], reduction="none"
        )
    return loss
