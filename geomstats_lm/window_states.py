"""What does one run of windows through the model give?

The states ``h_0 .. h_L`` of some of their tokens, and the next-token loss,
``loss[p] = -log softmax(logits[p])[token p + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from geomstats_lm.blocks import LanguageModel, capture


def run_windows(
    model: LanguageModel,
    ids: np.ndarray,
    tokens: np.ndarray,
    layers: Sequence[int],
    batch_size: int,
    buffer: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """States and losses of some tokens of the windows.

    Parameters
    ----------
    model : LanguageModel
    ids : array of int, shape (window, position)
        Token ids of all windows.
    tokens : array of int, shape (n,)
        Which tokens, counted through all windows, ascending.
    layers : sequence of int
    batch_size : int
        Windows per forward pass.
    buffer : array of float32, optional
        One-dimensional, at least as large as the states, which are then a view of it, so
        that no run needs new memory.

    Returns
    -------
    states : array of float32, shape (layer, n, dim)
    loss : array of float32, shape (n,), or None

    Raises
    ------
    ValueError
        If a state is not finite.
    RuntimeError
        If another thread ran the same model meanwhile.
    """
    length = ids.shape[1]
    shape = (len(layers), len(tokens), model.dim)
    if buffer is None:
        buffer = np.empty(prod(shape), dtype=np.float32)
    states = buffer[: prod(shape)].reshape(shape)
    loss = np.empty(len(tokens), dtype=np.float32) if has_loss(model) else None
    read, row = np.unique(tokens // length, return_inverse=True)
    place = row * length + tokens % length  # among the tokens of the windows that are read
    target = torch.from_numpy(states)
    for begin in range(0, len(read), batch_size):
        batch = torch.from_numpy(ids[read[begin : begin + batch_size]].astype(np.int64))
        captured, logits = capture(model, batch, head=loss is not None)
        if len(captured) != model.n_layers + 1:
            raise RuntimeError(
                f"{model.name}: {len(captured)} states came from one forward pass of "
                f"{model.n_layers} blocks; something else runs the same model at the same time"
            )
        first, last = np.searchsorted(place, [begin * length, begin * length + batch.numel()])
        pick: Any = slice(None)
        if last - first < batch.numel():
            pick = torch.from_numpy(place[first:last] - begin * length)
        for number, layer in enumerate(layers):
            target[number, first:last] = captured[layer].reshape(-1, model.dim).cpu()[pick]
        if loss is not None and logits is not None:
            of_batch = next_token_loss(logits, batch.to(logits.device)).reshape(-1)
            loss[first:last] = of_batch.cpu()[pick].numpy()
    # a sum is finite only where everything in it is; it is finite and cheap almost always
    bad = [
        layer
        for layer, state in zip(layers, states)
        if not np.isfinite(state.sum()) and not np.isfinite(state).all()
    ]
    if bad:
        raise ValueError(
            f"{model.name}: states of layers {bad} are not finite (model dtype "
            f"{model.attrs['model_dtype']}); load it with dtype='float32'"
        )
    return states, loss


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


def has_loss(model: LanguageModel) -> bool:
    """Whether the model predicts the next token: encoders and models with no head do not."""
    return model.vocabulary > 0 and model.causal
