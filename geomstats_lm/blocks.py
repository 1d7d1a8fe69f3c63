"""How are the states of a stack of blocks read, and how is one of them replaced?

``h_0`` is the input of the first block and ``h_l`` the output of block l, l = 1..L, always before
the final norm: ``h_l = block_l(h_{l-1})``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class UnsupportedModelError(ValueError):
    """The model's blocks do not form the stack that the package needs; the message says why."""


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model seen as a stack of blocks.

    Attributes
    ----------
    model : torch.nn.Module
        The transformers model, in evaluation mode.
    tokenizer : transformers tokenizer or None
    name, key : str
        Name, and the slug it is stored under.
    blocks : tuple of torch.nn.Module
        The L blocks, in order.
    dim : int
        Width of the state.
    vocabulary : int
        Number of logits (0 without a language-model head).
    attrs : dict
        What made it: source, revision, architecture, dtype, whether it is untrained.
    block_rest : tuple
        What each block returns beside the state: None where it returns a bare tensor.
    clones : bool
        Whether states must be copied when captured, since the model changes them in place.
    gathers_rows : bool
        Whether the head can be run on chosen positions only.
    causal : bool
        Whether a token's state is untouched by later tokens.
    """

    model: Any
    tokenizer: Any
    name: str
    key: str
    blocks: tuple[nn.Module, ...]
    dim: int
    vocabulary: int
    attrs: dict[str, Any]
    block_rest: tuple[tuple[Any, ...] | None, ...] = ()
    clones: bool = False
    gathers_rows: bool = False
    causal: bool = True

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """Where it takes its input; its blocks may be on other devices, or kept on disk."""
        places = (parameter.device for parameter in self.model.parameters())
        loaded = next((place for place in places if place.type != "meta"), None)
        hook = getattr(self.model, "_hf_hook", None)  # accelerate's, where modules are placed
        return loaded or torch.device(getattr(hook, "execution_device", None) or "cpu")


@torch.no_grad()
def capture(
    lm: LanguageModel, input_ids: torch.Tensor, *, head: bool = True
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Run the model and read all its states.

    Parameters
    ----------
    lm : LanguageModel
    input_ids : torch.Tensor, shape (batch, position)
    head : bool
        Whether the logits are wanted too.

    Returns
    -------
    states : list of L + 1 tensors, shape (batch, position, dim)
        ``h_0 .. h_L``, before the final norm.
    logits : torch.Tensor, shape (batch, position, vocabulary), or None
    """
    with _captured(lm) as states, ExitStack() as stack:
        if not head and lm.gathers_rows:
            stack.enter_context(head_rows(lm, torch.zeros(len(input_ids), 1, dtype=torch.long)))
        output = lm.model(input_ids=input_ids.to(lm.device))
    return states, getattr(output, "logits", None)


@contextmanager
def _captured(lm: LanguageModel) -> Iterator[list[torch.Tensor]]:
    """Within, one forward pass fills the list with ``h_0 .. h_L``."""
    states: list[torch.Tensor] = []
    keep: Callable[[torch.Tensor], torch.Tensor] = torch.clone if lm.clones else (lambda t: t)

    def before_first(module: nn.Module, args: Any, kwargs: Any) -> None:
        states.append(keep(state_argument(args, kwargs)))

    def after_block(module: nn.Module, args: Any, output: Any) -> None:
        states.append(keep(state_of(output)))

    with ExitStack() as stack:
        stack.callback(
            lm.blocks[0].register_forward_pre_hook(before_first, with_kwargs=True).remove
        )
        for block in lm.blocks:
            stack.callback(block.register_forward_hook(after_block).remove)
        yield states


@torch.no_grad()
def resume(
    lm: LanguageModel,
    input_ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    **inputs: torch.Tensor,
) -> torch.Tensor:
    """Run the model on from a given ``h_layer``, the blocks up to there skipped.

    Parameters
    ----------
    lm : LanguageModel
    input_ids : torch.Tensor, shape (batch, position)
        What the model reads: masks and positions come from it.
    layer : int
        1..L, the block whose output is replaced.
    state : torch.Tensor, shape (batch, position, dim)
        The output it gets.
    rows : torch.Tensor of int, shape (batch, n), optional
        The positions of each row whose logits are wanted; all by default.
    **inputs : torch.Tensor
        Further inputs of the model, such as ``position_ids``.

    Returns
    -------
    torch.Tensor, shape (batch, position or n, vocabulary)
        Logits.

    Raises
    ------
    ValueError
        If ``layer`` is not in 1..L or the state has the wrong shape.
    """
    with _resumed(lm, input_ids, layer, state) as ids:
        if rows is not None and lm.gathers_rows:
            with head_rows(lm, rows):
                return lm.model(input_ids=ids, **inputs).logits
        logits = lm.model(input_ids=ids, **inputs).logits
    return logits if rows is None else _take(logits, rows)


@torch.no_grad()
def resume_final(
    lm: LanguageModel,
    input_ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    **inputs: torch.Tensor,
) -> torch.Tensor:
    """Run the model on from a given ``h_layer`` up to its head.

    Parameters
    ----------
    lm, input_ids, layer, state, rows, **inputs
        As in :func:`resume`.

    Returns
    -------
    torch.Tensor, shape (batch, position or n, width)
        What :func:`apply_head` turns into logits: the states after the final norm, which are also
        the output of a model without a head; the logits themselves where
        ``lm.gathers_rows`` is False.
    """
    with _resumed(lm, input_ids, layer, state) as ids:
        final = _final_states(lm, ids, **inputs)
    return final if rows is None else _take(final, rows)


@torch.no_grad()
def capture_final(
    lm: LanguageModel, input_ids: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All states ``h_0 .. h_L`` of some windows, and what :func:`apply_head` takes."""
    with _captured(lm) as states:
        final = _final_states(lm, input_ids.to(lm.device))
    return states, final


@torch.no_grad()
def apply_head(lm: LanguageModel, final: torch.Tensor) -> torch.Tensor:
    """Logits of final states, whatever the model does to them before and after its head.

    Parameters
    ----------
    lm : LanguageModel
    final : torch.Tensor, shape (n, width)
        From :func:`resume_final`.

    Returns
    -------
    torch.Tensor, shape (n, vocabulary)
    """
    if not lm.gathers_rows:
        return final

    def exchange(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (final[None], *args[1:])

    # The model itself is run, on one token and with no block, so that soft caps and scales of
    # the logits are applied as it applies them.
    with ExitStack() as stack:
        for block, rest in zip(lm.blocks, lm.block_rest):
            stack.enter_context(skipped(block, rest, None))
        stack.enter_context(_before_head(lm, exchange))
        return lm.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=lm.device)).logits[0]


@contextmanager
def _resumed(
    lm: LanguageModel, input_ids: torch.Tensor, layer: int, state: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Within, the model starts from ``h_layer = state``; gives the ids on its device."""
    if not 1 <= layer <= lm.n_layers:
        raise ValueError(f"layer={layer}: accepted are 1..{lm.n_layers}")
    if tuple(state.shape) != (*input_ids.shape, lm.dim):
        raise ValueError(f"state has shape {tuple(state.shape)}, not {(*input_ids.shape, lm.dim)}")
    state = state.to(lm.device, next(lm.model.parameters()).dtype)
    with ExitStack() as stack:
        for index in range(layer):
            given = state if index == layer - 1 else None
            stack.enter_context(skipped(lm.blocks[index], lm.block_rest[index], given))
        yield input_ids.to(lm.device)


def _final_states(lm: LanguageModel, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    if not lm.gathers_rows:
        output = lm.model(input_ids=ids, **inputs)
        return output.logits if lm.vocabulary else output[0]
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kept.append(args[0])
        return (args[0][:, :1], *args[1:])  # the head runs on one position: it costs nothing

    with _before_head(lm, keep):
        lm.model(input_ids=ids, **inputs)
    return kept[0]


@contextmanager
def _before_head(lm: LanguageModel, hook: Callable[..., Any]) -> Iterator[None]:
    head: Any = lm.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def resume_single(
    lm: LanguageModel,
    input_ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    patch: torch.Tensor,
    rows: torch.Tensor,
    *,
    head: bool = True,
) -> torch.Tensor:
    """Logits at positions each of which alone gets another ``h_layer``, in one forward pass.

    The patched tokens are appended to the clean window.  Each attends to the clean tokens before
    its own position and to itself, which is exact for the output at that position in models
    whose only mixer is attention with position ids; :func:`appends_exactly` tests a model.

    Parameters
    ----------
    lm : LanguageModel
    input_ids : torch.Tensor, shape (batch, position)
    layer : int
        1..L, the block whose output is replaced.
    state : torch.Tensor, shape (batch, position, dim)
        Clean ``h_layer``.
    patch : torch.Tensor, shape (batch, n, dim)
        What replaces it at ``rows``, one position at a time.
    rows : torch.Tensor of int, shape (batch, n)
        Positions; one may come several times.
    head : bool
        Whether logits are wanted, or what :func:`apply_head` makes them from.

    Returns
    -------
    torch.Tensor, shape (batch, n, vocabulary or width)
    """
    batch, length = input_ids.shape
    n = rows.shape[1]
    own = torch.arange(length, length + n)
    position = torch.cat([torch.arange(length).expand(batch, length), rows], dim=1)
    allowed = torch.zeros(batch, length + n, length + n, dtype=torch.bool)
    allowed[:, :, :length] = torch.arange(length)[None, None] <= position[:, :, None]
    # a patched token does not see its clean self
    allowed[torch.arange(batch)[:, None], own[None], rows] = False
    allowed[:, own, own] = True
    dtype = next(lm.model.parameters()).dtype
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    run = resume if head else resume_final
    return run(
        lm,
        torch.cat([input_ids, input_ids.gather(1, rows)], dim=1),
        layer,
        torch.cat([state, patch.to(state)], dim=1),
        rows=own.expand(batch, n),
        position_ids=position.to(lm.device),
        attention_mask=mask[:, None].to(lm.device),
    )


@torch.no_grad()
def appends_exactly(
    lm: LanguageModel, input_ids: torch.Tensor, states: Sequence[torch.Tensor]
) -> bool:
    """Whether :func:`resume_single` agrees with one forward pass per patched position.

    Parameters
    ----------
    lm : LanguageModel
    input_ids : torch.Tensor, shape (batch, position)
    states : sequence of L + 1 tensors, shape (batch, position, dim)
        Clean states of these windows.

    Returns
    -------
    bool
        True when both agree at two layers and three positions to what the shape of the batch does
        to the model's rounding.
    """
    ids, length = input_ids[:1].cpu(), input_ids.shape[1]
    rows = torch.tensor([[1 % length, length // 2, length - 1]])
    for layer in sorted({1, lm.n_layers}):
        clean = states[layer][:1]
        patch = clean[:, rows[0]].flip(1) * 0.9  # states of this layer, at other positions
        try:
            quick = resume_single(lm, ids, layer, clean, patch, rows, head=False)[0].float()
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
            return False  # the model takes no position ids or no such mask
        each = clean.repeat(3, 1, 1)
        each[torch.arange(3), rows[0]] = patch[0]
        slow = resume_final(lm, ids.repeat(3, 1), layer, each, rows=rows.T)[:, 0]
        alone = torch.cat([
            resume_final(lm, ids, layer, each[i : i + 1], rows=rows[:, [i]])[0] for i in range(3)
        ])  # fmt: skip
        rounding = float((alone.float() - slow.float()).abs().max())
        least = 64 * torch.finfo(slow.dtype).eps * float(slow.abs().max())
        if not float((quick - slow.float()).abs().max()) <= max(8 * rounding, least):
            return False
    return True


@contextmanager
def head_rows(lm: LanguageModel, rows: torch.Tensor) -> Iterator[None]:
    """Within, the language-model head sees only positions ``rows[i]`` of batch row i."""

    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_take(args[0], rows), *args[1:])

    with _before_head(lm, gather):
        yield


def _take(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``tensor[i, rows[i]]`` for every batch row i: (batch, n, ...)."""
    rows = rows.to(tensor.device)
    return tensor[torch.arange(len(rows), device=tensor.device)[:, None], rows]


@contextmanager
def skipped(
    block: nn.Module, rest: tuple[Any, ...] | None, given: torch.Tensor | None
) -> Iterator[None]:
    """Within, the block returns ``given``, or its own input, without computing anything."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        state = state_argument(args, kwargs) if given is None else given
        return state if rest is None else (state, *rest)

    # An instance attribute shadows the class's forward; one that was there already comes back.
    before = block.__dict__.get("forward")
    block.__dict__["forward"] = stand_in
    try:
        yield
    finally:
        del block.__dict__["forward"]
        if before is not None:
            block.__dict__["forward"] = before


def state_argument(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


def state_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output
