"""What are the logits of a window when some of its tokens get another state at one layer?

All marked positions at once, or one position at a time: then the output at position p comes from
``h_l[p]`` patched and every other state clean.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from geomstats_lm.blocks import LanguageModel, resume, resume_single


def patch_all(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    variants: list[np.ndarray],
    mask: np.ndarray,
) -> Iterator[torch.Tensor]:
    """Logits of the marked tokens with all of them patched at once, one variant after another.

    Parameters
    ----------
    lm : LanguageModel
    ids : torch.Tensor, shape (window, position)
    layer : int
        1..L, the block whose output is changed.
    state : torch.Tensor, shape (window, position, dim)
        Clean ``h_layer``.
    variants : list of numpy.ndarray, shape (window * position, dim)
        What is taken off the state.
    mask : numpy.ndarray of bool, shape (window * position,)
        Tokens that are patched; at the others the state stays clean.

    Yields
    ------
    torch.Tensor, shape (marked tokens, vocabulary)
    """
    rows = torch.from_numpy(np.flatnonzero(mask))
    for residual in variants:
        change = torch.from_numpy(np.where(mask[:, None], residual, 0.0)).to(state)
        logits = resume(lm, ids, layer, state - change.reshape(state.shape))
        yield logits.reshape(-1, logits.shape[-1])[rows.to(logits.device)]


def patch_single(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    variants: list[np.ndarray],
    mask: np.ndarray,
    *,
    appends: bool,
    batch_size: int,
) -> Iterator[torch.Tensor]:
    """Logits of the marked tokens, each patched alone, one variant after another.

    Parameters
    ----------
    lm, ids, layer, state, variants, mask
        As in :func:`patch_all`.
    appends : bool
        Whether the model may be run with the patched tokens appended to the clean window
        (:func:`geomstats_lm.blocks.appends_exactly`); else every patched token takes a row of a
        batch.
    batch_size : int
        Rows of such a batch.

    Yields
    ------
    torch.Tensor, shape (marked tokens, vocabulary)
    """
    flat = np.flatnonzero(mask)
    window, position = np.divmod(flat, ids.shape[1])
    states = state.reshape(-1, state.shape[-1])
    patches = [states[flat] - torch.from_numpy(r[flat]).to(state) for r in variants]
    if len(flat) == 0:
        yield from (state.new_empty(0, lm.vocabulary) for _ in patches)
    elif appends:
        yield from _appended(lm, ids, layer, state, patches, window, position)
    else:
        for patch in patches:
            yield _batched(lm, ids, layer, state, patch, window, position, batch_size)


def _appended(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    patches: list[torch.Tensor],
    window: np.ndarray,
    position: np.ndarray,
) -> Iterator[torch.Tensor]:
    # All variants of a window share one pass over its clean tokens; rows are filled up to the
    # longest with position 0, whose outputs are dropped.
    counts = np.bincount(window, minlength=len(ids))
    widest = int(counts.max())
    place = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = torch.zeros(len(ids), widest, dtype=torch.long)
    rows[window, place] = torch.from_numpy(position)
    patch = state[:, :1].repeat(1, len(patches) * widest, 1)
    for v, values in enumerate(patches):
        patch[window, v * widest + place] = values
    logits = resume_single(lm, ids, layer, state, patch, rows.repeat(1, len(patches)))
    for v in range(len(patches)):
        yield logits[window, v * widest + place]


def _batched(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    patch: torch.Tensor,
    window: np.ndarray,
    position: np.ndarray,
    batch_size: int,
) -> torch.Tensor:
    # One row of a batch per patched position, cut off after it; rows of like length go together
    # so that little is computed in vain.
    order = np.argsort(position, kind="stable")
    parts = []
    for begin in range(0, len(order), batch_size):
        some = order[begin : begin + batch_size]
        stop = int(position[some].max()) + 1
        each = state[window[some], :stop].clone()
        each[torch.arange(len(some)), position[some]] = patch[some]
        rows = torch.from_numpy(position[some])[:, None]
        parts.append(resume(lm, ids[window[some], :stop], layer, each, rows=rows)[:, 0])
    logits = torch.cat(parts)
    return logits[torch.from_numpy(np.argsort(order))]
