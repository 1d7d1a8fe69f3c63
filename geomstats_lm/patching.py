"""What are the final states of a window when some of its tokens get another state at one layer?

All marked positions at once, or one position at a time: then the output at position p comes from
``h_l[p]`` patched and every other state clean.  A variant is what is taken off ``h_l``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from geomstats_lm.blocks import LanguageModel, resume_final, resume_single

APPENDED = 2  # appended tokens of one pass, in windows: more would make attention grow faster
MASK_ELEMENTS = 1 << 25  # bounds the attention masks of appended tokens


def patch_all(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    variants: list[np.ndarray],
    mask: np.ndarray,
) -> Iterator[torch.Tensor]:
    """Final states with all marked tokens patched at once, one variant after another.

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
    torch.Tensor, shape (window * position, width)
        Of all tokens, for :func:`geomstats_lm.blocks.apply_head`.
    """
    for off in variants:
        change = np.where(mask[:, None], off, 0.0).reshape(state.shape)
        final = resume_final(lm, ids, layer, _less(state, change))
        yield final.reshape(-1, final.shape[-1])


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
    """Final states of the marked tokens, each patched alone, one variant after another.

    Parameters
    ----------
    lm, ids, layer, state, variants, mask
        As in :func:`patch_all`; at least one token is marked.
    appends : bool
        Whether the model may be run with the patched tokens appended to the clean window
        (:func:`geomstats_lm.blocks.appends_exactly`); else every patched token takes a row of a
        batch.
    batch_size : int
        Rows of such a batch.

    Yields
    ------
    torch.Tensor, shape (marked tokens, width)
    """
    window, position, patches = _marked(state, variants, mask)
    if appends:
        yield from _appended(lm, ids, layer, state, patches, window, position)
    else:
        for patch in patches:
            yield _batched(lm, ids, layer, state, patch, window, position, batch_size)


def patch_downstream(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    off: np.ndarray,
    mask: np.ndarray,
    *,
    batch_size: int,
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Final states of whole windows in each of which one marked token is patched.

    Parameters
    ----------
    lm, ids, layer, state, mask, batch_size
        As in :func:`patch_single`.
    off : numpy.ndarray, shape (window * position, dim)
        What is taken off the state.

    Yields
    ------
    tokens : numpy.ndarray of int, shape (n,)
        The tokens that are patched, of one window.
    final : torch.Tensor, shape (n, position, width)
    """
    window, position, (patch,) = _marked(state, [off], mask)
    for w in np.unique(window):
        inside = np.flatnonzero(window == w)
        for begin in range(0, len(inside), batch_size):
            some = inside[begin : begin + batch_size]
            each = state[w].repeat(len(some), 1, 1)
            each[torch.arange(len(some)), position[some]] = patch[some]
            row = ids[w].repeat(len(some), 1)
            yield w * ids.shape[1] + position[some], resume_final(lm, row, layer, each)


def _marked(
    state: torch.Tensor, variants: list[np.ndarray], mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[torch.Tensor]]:
    """Window and position of the marked tokens, and their patched states in each variant."""
    flat = np.flatnonzero(mask)
    window, position = np.divmod(flat, state.shape[1])
    clean = state.reshape(-1, state.shape[-1])[torch.from_numpy(flat).to(state.device)]
    return window, position, [_less(clean, off[flat]) for off in variants]


def _less(state: torch.Tensor, off: np.ndarray) -> torch.Tensor:
    """``state - off``, rounded once where the model computes in 16 bits."""
    wide = torch.promote_types(state.dtype, torch.float32)
    change = torch.from_numpy(np.ascontiguousarray(off)).to(state.device, wide)
    return (state.to(wide) - change).to(state.dtype)


def _appended(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    patches: list[torch.Tensor],
    window: np.ndarray,
    position: np.ndarray,
) -> Iterator[torch.Tensor]:
    # All variants of a window stand side by side, cut into runs of columns that share one pass
    # over the clean tokens; windows with fewer tokens are filled up with position 0, whose outputs
    # are dropped.
    length = ids.shape[1]
    counts = np.bincount(window, minlength=len(ids))
    widest = int(counts.max())
    place = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = torch.zeros(len(ids), widest, dtype=torch.long)
    rows[window, place] = torch.from_numpy(position)
    rows = rows.repeat(1, len(patches))
    patch = state[:, :1].repeat(1, len(patches) * widest, 1)
    for v, values in enumerate(patches):
        patch[window, v * widest + place] = values
    n_columns = rows.shape[1]
    run = min(n_columns, APPENDED * length)
    at_once = max(1, MASK_ELEMENTS // (length + run) ** 2)
    final = torch.cat([
        torch.cat([
            resume_single(
                lm, ids[w : w + at_once], layer, state[w : w + at_once],
                patch[w : w + at_once, c : c + run], rows[w : w + at_once, c : c + run],
                head=False,
            )
            for c in range(0, n_columns, run)
        ], dim=1)
        for w in range(0, len(ids), at_once)
    ])  # fmt: skip
    for v in range(len(patches)):
        yield final[window, v * widest + place]


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
        parts.append(resume_final(lm, ids[window[some], :stop], layer, each, rows=rows)[:, 0])
    final = torch.cat(parts)
    return final[torch.from_numpy(np.argsort(order)).to(final.device)]
