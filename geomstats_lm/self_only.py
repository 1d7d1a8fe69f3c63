"""What does a block do to a token that has no context?

``T_l(h) = block_l`` run on a window of length one: attention can look at nothing but the token
itself and a recurrence starts empty, so that ``r_l`` is the effect of context alone.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

_ONE_AT_A_TIME = threading.Lock()  # hooks on a shared model are no business of two threads


class _DoneError(Exception):
    """Ends the forward pass once the block has run."""


def run_block(model: Any, layer: int, states: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """h_l of tokens that are alone in their window.

    Parameters
    ----------
    model : LanguageModel
    layer : int
        1..L, the block to run.
    states : numpy.ndarray of float32, shape (n, d)
        The block's input h_{l-1}, one token each.
    token_ids : numpy.ndarray of int, shape (n,)
        For models whose blocks read the token itself.

    Returns
    -------
    numpy.ndarray of float32, shape (n, d)

    Raises
    ------
    ValueError
        If the layer or the width does not belong to the model.
    """
    import torch

    from geomstats_lm.neighbours import one_thread

    if not 1 <= layer <= model.n_layers:
        raise ValueError(f"layer={layer}: {model.name} has layers 1..{model.n_layers}")
    if states.shape[1] != model.dim:
        raise ValueError(f"states have {states.shape[1]} dims, {model.name} has {model.dim}")
    result = np.empty(states.shape, dtype=np.float32)
    with _ONE_AT_A_TIME, torch.no_grad(), one_thread():
        for start in range(0, len(states), 512):
            part = slice(start, start + 512)
            given = torch.from_numpy(np.ascontiguousarray(states[part]))[:, None]
            ids = torch.from_numpy(token_ids[part].astype(np.int64))[:, None]
            result[part] = _run(model, layer, given, ids)
    return result


def _run(model: Any, layer: int, given: Any, ids: Any) -> np.ndarray:
    from geomstats_lm.blocks import skipped, state_of

    dtype = next(model.model.parameters()).dtype
    given = given.to(model.device, dtype)
    returned: list[Any] = []

    def replace_input(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (given, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": given}

    def stop(module: Any, args: Any, output: Any) -> None:
        returned.append(state_of(output))
        raise _DoneError

    block = model.blocks[layer - 1]
    with ExitStack() as stack:
        for index in range(layer - 1):
            stack.enter_context(skipped(model.blocks[index], model.block_rest[index], None))
        stack.callback(block.register_forward_pre_hook(replace_input, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(stop).remove)
        with suppress(_DoneError):
            model.model(input_ids=ids.to(model.device))
    return returned[0][:, 0].float().cpu().numpy()
