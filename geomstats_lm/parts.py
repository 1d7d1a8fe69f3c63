"""Which share of a block's update comes from its mixer, and which from its MLP?

A pre-norm block adds two contributions to the state, ``D = mixer + mlp``, the mixer (attention or a
recurrence) being the one part that sees other tokens.  They are found by what adds up, not by name.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import torch
import xarray as xr
from torch import nn

from geomstats_lm.blocks import LanguageModel, UnsupportedModelError, state_argument, state_of
from geomstats_lm.cube import (
    finish_leaf,
    open_leaf,
    prepare_leaf,
    progress_bar,
    token_runs,
    write_unit,
)
from geomstats_lm.models import parameter_checksum

TOLERANCE = 1e-4  # of the update's size: what float32 sums in another order may differ by
DEPTH = 3  # how far below a block contributions are looked for

LONG_NAMES = {
    "mixer": "what attention or recurrence adds to the state",
    "mlp": "what the MLP adds to the state",
}


@dataclass(frozen=True)
class Contributions:
    """Where in a block its two contributions come out.

    ``mixer`` and ``mlp`` are names of modules below the block, empty where it has no such part;
    ``scale`` is what the block multiplies both with before adding them.
    """

    mixer: str
    mlp: str
    scale: float = 1.0


def find_parts(model: LanguageModel) -> tuple[Contributions, ...]:
    """Find every block's mixer and MLP by what adds up to its update on a short random window.

    Parameters
    ----------
    model : LanguageModel

    Returns
    -------
    tuple of Contributions
        One per block.

    Raises
    ------
    UnsupportedModelError
        If the outputs of no two modules of a block add up to its update (blocks that normalize
        after adding, or keep a part to themselves): the architecture is named.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from geomstats_lm import as_language_model
    >>> tiny = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))
    >>> find_parts(as_language_model(tiny, name="tiny"))[0]
    Contributions(mixer='attn', mlp='mlp', scale=1.0)
    """
    embeddings: Any = model.model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    ids = torch.randint(0, vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for layer, block in enumerate(model.blocks, start=1):
        names = {n: m for n, m in block.named_modules() if n and n.count(".") < DEPTH}
        given, outputs, state = _outputs(model, ids, block, names)
        found.append(_matching(model, layer, state - given, outputs, names))
    return tuple(found)


@torch.no_grad()
def capture_parts(
    model: LanguageModel, input_ids: torch.Tensor, where: tuple[Contributions, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the model and read what mixer and MLP of every block add to the state.

    Parameters
    ----------
    model : LanguageModel
    input_ids : torch.Tensor, shape (batch, position)
    where : tuple of Contributions
        From :func:`find_parts`.

    Returns
    -------
    mixer, mlp : lists of L tensors, shape (batch, position, dim)

    Raises
    ------
    UnsupportedModelError
        If they do not add up to the update on these windows.
    """
    parts: dict[str, list[torch.Tensor]] = {"mixer": [], "mlp": []}
    for layer, (block, place) in enumerate(_run(model, input_ids, where), start=1):
        given, outputs, state = block
        zero = torch.zeros_like(state)
        own = {
            kind: (outputs[name] * place.scale if name else zero)
            for kind, name in (("mixer", place.mixer), ("mlp", place.mlp))
        }
        update = state - given
        missed = float((update - own["mixer"] - own["mlp"]).norm())
        if not missed <= 10 * TOLERANCE * float(_size(update, given)):
            raise UnsupportedModelError(
                f"{model.name}: the parts of block {layer} miss {missed / float(update.norm()):.1%}"
                " of its update on these windows, though they added up on random tokens"
            )
        for kind, tensor in own.items():
            parts[kind].append(tensor)
    return parts["mixer"], parts["mlp"]


def extract_parts(
    model: LanguageModel,
    data: xr.DataTree | xr.Dataset,
    *,
    tokens: str = "evaluation",
    batch_size: int = 16,
    store: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """The contributions of mixer and MLP to every update, for tokens already extracted.

    Parameters
    ----------
    model : LanguageModel
        The model that the activations came from.
    data : xarray.DataTree or xarray.Dataset
        The model's node of a study, or its activations: whole windows, whose ids are read.
    tokens : {"evaluation", "reference", "all"}
        Which tokens' contributions to keep.
    batch_size : int
        Windows per forward pass.
    store : str or Path, optional
        Study to write the leaf ``parts`` to, resumably; kept in memory without one.
    overwrite, progress
        As for :func:`geomstats_lm.extract`.

    Returns
    -------
    xarray.Dataset
        ``mixer`` and ``mlp`` (model, layer 1..L, token, dim), adding up to the update.

    Raises
    ------
    UnsupportedModelError
        If the parts of this architecture do not add up to its updates.
    ValueError
        If the activations are not of this model or lack tokens of their windows.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node, load_example
    >>> model = load_example("gpt2")
    >>> parts = extract_parts(model, example_node(model=model), progress=False)
    >>> sorted(parts.data_vars)
    ['mixer', 'mlp']
    """
    source = data["activations"].to_dataset() if isinstance(data, xr.DataTree) else data
    ids, rows, length = _windows(model, source, tokens)
    where = find_parts(model)
    n = len(rows) * length
    kept = source.isel(token=(rows[:, None] * length + np.arange(length)).ravel())
    run = max(1, 4096 // length) * length
    shape, chunks = (1, model.n_layers, n, model.dim), (1, 1, run, model.dim)
    template = xr.Dataset(
        {
            name: (
                ("model", "layer", "token", "dim"),
                da.zeros(shape, chunks=chunks, dtype=np.float32), {"long_name": text},
            )
            for name, text in LONG_NAMES.items()
        },
        {
            "model": source.model.values,
            "layer": np.arange(1, model.n_layers + 1),
            "depth": ("layer", np.arange(1, model.n_layers + 1) / model.n_layers),
            **{n: c.variable for n, c in kept.coords.items() if c.dims == ("token",)},
        },
        {k: v for k, v in source.attrs.items() if k != "settings"},
    )  # fmt: skip
    runs = token_runs(n, run)
    if store is None:
        result = template.map(lambda v: xr.zeros_like(v).compute(), keep_attrs=True)
        for start, stop in runs:
            values = _read(model, ids, start, stop, where, batch_size)
            for name, part in values.items():
                result[name][0, :, start:stop] = part
        return result
    settings = {"model": parameter_checksum(model), "tokens": tokens,
                "text": source.attrs.get("text_checksum", "")}  # fmt: skip
    since, key = time.time(), str(source.model.values[0])
    finished = prepare_leaf(
        template, store, key, "parts", settings=settings,
        grid={"layer": [(0, model.n_layers)], "token": runs}, overwrite=overwrite,
    )[0]  # fmt: skip
    every = slice(None)
    with progress_bar(progress, n, f"{key} parts") as bar:
        for number, (start, stop) in enumerate(runs):
            if not finished[number]:
                values = _read(model, ids, start, stop, where, batch_size)
                region = (every, every, slice(start, stop), every)
                blocks = {name: part[None] for name, part in values.items()}
                write_unit(store, key, "parts", (0, number), blocks, dict.fromkeys(blocks, region))
            bar.update(stop - start)
    finish_leaf(store, key, "parts", since=since)
    return open_leaf(store, key, "parts")


@torch.no_grad()
def _outputs(
    model: LanguageModel, ids: torch.Tensor, block: nn.Module, names: dict[str, nn.Module]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """State before a block, outputs of modules in it in the order they ran, and state after."""
    given: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    outputs: dict[str, torch.Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(state_argument(args, kwargs).float().clone())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        states.append(state_of(output).float().clone())

    with ExitStack() as stack:
        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(after).remove)
        for name, module in names.items():

            def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                tensor = state_of(output)
                # some experts and heads run on tokens laid out flat: only what has a state's shape
                if torch.is_tensor(tensor) and tensor.numel() == given[0].numel():
                    outputs[name] = tensor.float().reshape(given[0].shape).clone()

            stack.callback(module.register_forward_hook(keep).remove)
        model.model(input_ids=ids.to(model.device))
    place = states[0].device  # a block's input may come from another device
    return given[0].to(place), {n: o.to(place) for n, o in outputs.items()}, states[0]


def _run(
    model: LanguageModel, ids: torch.Tensor, where: tuple[Contributions, ...]
) -> list[tuple[tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor], Contributions]]:
    """For each block what :func:`_outputs` gives of its two parts, in one forward pass."""
    collected: list[dict[str, Any]] = [{"outputs": {}} for _ in model.blocks]
    with ExitStack() as stack:
        for block, place, into in zip(model.blocks, where, collected):
            modules = dict(block.named_modules())

            def before(module: nn.Module, args: Any, kwargs: Any, into: Any = into) -> None:
                into["given"] = state_argument(args, kwargs).float().clone()

            def after(module: nn.Module, args: Any, output: Any, into: Any = into) -> None:
                into["state"] = state_of(output).float().clone()
                into["given"] = into["given"].to(into["state"].device)

            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
            for name in filter(None, (place.mixer, place.mlp)):

                def keep(
                    module: nn.Module, args: Any, output: Any, into: Any = into, name: str = name
                ) -> None:
                    tensor = state_of(output).float()
                    into["outputs"][name] = tensor.reshape(into["given"].shape).clone()

                stack.callback(modules[name].register_forward_hook(keep).remove)
        model.model(input_ids=ids.to(model.device))
    return [((c["given"], c["outputs"], c["state"]), place) for c, place in zip(collected, where)]


def _matching(
    model: LanguageModel,
    layer: int,
    update: torch.Tensor,
    outputs: dict[str, torch.Tensor],
    names: dict[str, nn.Module],
) -> Contributions:
    """The outermost two modules whose outputs add up to the update; or one that is all of it."""
    config: Any = model.model.config
    scales = [1.0, float(getattr(config, "residual_multiplier", 1.0) or 1.0)]
    allowed = TOLERANCE * float(update.norm())
    order = list(outputs)  # as they ran
    outermost = sorted(order, key=lambda n: (n.count("."), order.index(n)))
    for scale in dict.fromkeys(scales):
        best: tuple[tuple[int, int], Contributions] | None = None
        for i, first in enumerate(outermost):
            rest = update - scale * outputs[first]
            if float(rest.norm()) <= allowed:
                return Contributions(*_single(first), scale)
            for second in outermost[i + 1 :]:
                if float((rest - scale * outputs[second]).norm()) > allowed:
                    continue
                depth = (first.count(".") + second.count("."), i)
                pair = sorted((first, second), key=order.index)
                if best is None or depth < best[0]:
                    best = depth, Contributions(pair[0], pair[1], scale)
        if best is not None:
            return best[1]
    raise UnsupportedModelError(
        f"{model.attrs.get('architecture', model.name)} ({model.name}): no two of the modules of "
        f"block {layer} ({', '.join(n for n in names if '.' not in n)}) add up to its update, so "
        "mixer and MLP cannot be told apart (does it normalize after adding?)"
    )


def _single(name: str) -> tuple[str, str]:
    """A block with one part: a mixer, unless it is named an MLP."""
    return (
        ("", name) if any(word in name.lower() for word in ("mlp", "ffn", "feed")) else (name, "")
    )


def _size(update: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    # a small update of a large state carries the rounding of the state
    return update.norm() + 1e-3 * given.norm()


def _windows(
    model: LanguageModel, source: xr.Dataset, tokens: str
) -> tuple[np.ndarray, np.ndarray, int]:
    """Token ids of the windows whose tokens are wanted, their numbers, and their length."""
    if tokens not in ("evaluation", "reference", "all"):
        raise ValueError(f"tokens={tokens!r}: accepted are 'evaluation', 'reference', 'all'")
    recorded = source.attrs.get("parameter_checksum", "")
    if recorded and recorded != parameter_checksum(model):
        raise ValueError(f"model: {model.name} is not the one whose activations these are")
    length = int(source.attrs["window_length"])
    if source.attrs.get("n_tokens_left_out", 0) or source.sizes["token"] % length:
        raise ValueError("data: tokens of some windows are missing, so they cannot be read again")
    split = source.split.values.reshape(-1, length)[:, 0]
    wanted = {"evaluation": split == 1, "reference": split == 0, "all": split >= 0}[tokens]
    rows = np.flatnonzero(wanted)
    return source.token_id.values.reshape(-1, length)[rows], rows, length


def _read(
    model: LanguageModel, ids: np.ndarray, start: int, stop: int,
    where: tuple[Contributions, ...], batch_size: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Contributions of a run of whole windows, each (L, stop - start, dim)."""
    length = ids.shape[1]
    result = {
        n: np.empty((model.n_layers, stop - start, model.dim), np.float32) for n in LONG_NAMES
    }
    for row in range(start // length, stop // length, batch_size):
        last = min(row + batch_size, stop // length)
        batch = torch.from_numpy(ids[row:last].astype(np.int64))
        place = slice(row * length - start, last * length - start)
        for name, tensors in zip(LONG_NAMES, capture_parts(model, batch, where)):
            for layer, tensor in enumerate(tensors):
                result[name][layer, place] = tensor.reshape(-1, model.dim).cpu().numpy()
    return result
