"""How is a perturbation labelled, cut into units of whole windows, and spread over workers?

A unit is a run of windows with all its layers, classes and variants.  The first unit also holds
what needs all tokens, such as ``damage_ratio = sum KL / sum KL_control``, so it is done last.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import torch
import xarray as xr

from geomstats_lm.blocks import LanguageModel
from geomstats_lm.controls import participation_ratio
from geomstats_lm.cube import (
    LEAVES,
    LEDGER,
    finish_leaf,
    open_leaf,
    prepare_leaf,
    progress_bar,
    write_unit,
)
from geomstats_lm.divergence import OUTPUT_MEASURES, STATE_MEASURES
from geomstats_lm.output_damage import Ask, Inputs, damage_of_windows, replay_floors
from geomstats_lm.selection import part_of
from geomstats_lm.storage import open_group

TOKENS_PER_CHUNK = 1 << 16
# A model's blocks are stood in for while it runs, so one process runs it once at a time.
MODEL_LOCK = threading.Lock()


class Shared(NamedTuple):
    """What all units read: a worker gets it once."""

    token_id: np.ndarray
    length: int
    residual: xr.DataArray  # (function_class, layer, token, dim)
    masks: Mapping[str, np.ndarray]  # way of patching -> bool (layer, token)
    pools: Sequence[np.ndarray]  # layer index -> tokens that controls draw from
    donors: dict[tuple[int, int], np.ndarray]  # residuals of these, once read


class Work(NamedTuple):
    """A perturbation to be done unit by unit."""

    model: LanguageModel
    shared: Shared
    ask: Ask
    labelled: bool  # whether there is a dim ``replacement``
    runs: list[tuple[int, int]]
    template: xr.Dataset
    store: str | Path | None
    key: str
    leaf: str


def perturbation_template(
    parts: xr.Dataset, classes: list[str], ask: Ask, *, labelled: bool
) -> xr.Dataset:
    """Labels and shapes of a perturbation with no values.

    Parameters
    ----------
    parts : xarray.Dataset
        ``residual`` and its labels.
    classes : list of str
    ask : Ask
    labelled : bool
        Whether measures have the dim ``replacement``.

    Returns
    -------
    xarray.Dataset
    """
    sizes = {
        "model": 1, "function_class": len(classes), "replacement": len(ask.rules),
        "positions": len(ask.positions), "control": len(ask.controls), "draw": ask.draws,
        "layer": parts.sizes["layer"], "token": parts.sizes["token"],
    }  # fmt: skip
    group = ("model", "function_class", *(["replacement"] if labelled else []))
    first = ask.control_measures[0]
    floor = "kl" if ask.model_has_head else "state_distance"
    described = {**OUTPUT_MEASURES, **STATE_MEASURES}
    variables: dict[str, tuple[tuple[str, ...], str, str]] = {}
    for name in ask.measures:
        variables[name] = ((*group, "positions", "layer", "token"), *described[name])
    for name in ask.control_measures:
        text, units = described[name]
        own = (*group, "positions", "control", "draw", "layer", "token")
        variables[f"{name}_control"] = (own, f"{text}, under the control", units)
    if ask.downstream:
        text, units = described[floor]
        own = (*group, "layer", "token")
        variables["downstream"] = (own, f"mean at later tokens of the window: {text}", units)
    variables["patched"] = (
        ("model", "positions", "layer", "token"), "whether the token was patched", "",
    )  # fmt: skip
    variables["damage_ratio"] = (
        (*group, "positions", "control", "layer"), f"mean {first} over mean {first} of the control",
        "",
    )  # fmt: skip
    variables["participation_ratio"] = (
        ("model", "function_class", "layer"), "number of directions that the residuals vary in", "",
    )  # fmt: skip
    variables[f"{floor}_floor"] = (
        ("model", "positions"), f"largest {floor} measured with nothing changed",
        described[floor][1],
    )  # fmt: skip
    variables["replay_difference"] = (
        ("model",), "largest change of final states when replayed from an unchanged state", "",
    )  # fmt: skip
    arrays = {}
    for name, (own, text, units) in variables.items():
        dtype, fill = (bool, False) if name == "patched" else (np.float64, np.nan)
        shape = [sizes[d] for d in own]
        chunks = [min(s, TOKENS_PER_CHUNK) if d == "token" else s for d, s in zip(own, shape)]
        more = {"units": units} if units else {}
        arrays[name] = (
            own, da.full(shape, fill, dtype=dtype, chunks=chunks), {"long_name": text, **more},
        )  # fmt: skip
    coords = {name: c for name, c in parts.coords.items() if name != "function_class"}
    coords["function_class"] = classes
    coords["positions"], coords["control"] = list(ask.positions), list(ask.controls)
    coords["draw"] = np.arange(ask.draws)
    if labelled:
        coords["replacement"] = [rule.label for rule in ask.rules]
        coords["factor"] = ("replacement", [rule.factor for rule in ask.rules])
    attrs = {k: v for k, v in parts.attrs.items() if k != "settings"}
    attrs["single_position_path"] = "appended" if ask.appends else "batched"
    return xr.Dataset(arrays, coords, attrs)


def run_units(
    work: Work,
    *,
    settings: Mapping[str, Any],
    overwrite: bool,
    part: tuple[int, int] | None,
    client: Any,
    progress: bool,
) -> xr.Dataset:
    """Do the units of a perturbation that are not finished.

    Parameters
    ----------
    work : Work
    settings : mapping
        What makes it.
    overwrite : bool
    part : (int, int), optional
        Do the i-th of n parts only.
    client : dask.distributed.Client, optional
    progress : bool

    Returns
    -------
    xarray.Dataset
    """
    since = time.time()
    finished, memory = _prepare(work, settings, overwrite)
    mine = [int(i) for i in part_of(len(work.runs), part)]
    sizes = np.array([stop - start for start, stop in work.runs])
    each = len(work.ask.layers) * work.shared.residual.sizes["function_class"]
    with progress_bar(
        progress, int(sizes[mine].sum()) * each, f"{work.key} {work.leaf}",
        initial=int(sizes[mine][finished[mine]].sum()) * each,
    ) as bar:  # fmt: skip
        todo = [i for i in mine if i > 0 and not finished[i]]
        for number, values in _spread(work, todo, client, bar, each):
            if values is not None:
                _keep(memory, values, slice(*work.runs[number]))
        if not finished[0] and (part is None or _only_first_left(work)):
            _first_unit(work, memory, bar)
    if work.store is None:
        return memory
    complete = finish_leaf(work.store, work.key, work.leaf, since=since)
    return open_leaf(work.store, work.key, work.leaf, incomplete="error" if complete else "ignore")


def check_target(
    leaf: str, part: tuple[int, int] | None, store: str | Path | None, overwrite: bool
) -> None:
    """Refuse leaves that hold something else, and parts that cannot be put together."""
    others = [name for name in LEAVES if name != "perturbation"]
    if leaf in others or not re.fullmatch(r"[a-z][a-z0-9_]*", leaf):
        raise ValueError(
            f"leaf={leaf!r}: accepted are names of small letters, digits and underscores other "
            f"than {', '.join(others)}"
        )
    if part is None:
        return
    if len(part) != 2 or not 1 <= part[0] <= part[1]:
        raise ValueError(f"part={part}: accepted are (i, n) with i = 1..n, such as (2, 4)")
    if store is None or overwrite:
        raise ValueError(
            f"part={part}: parts are put together in a store, so pass store=, and not overwrite="
        )


def _prepare(
    work: Work, settings: Mapping[str, Any], overwrite: bool
) -> tuple[np.ndarray, xr.Dataset]:
    """Which units are finished, and a Dataset in memory for the rest where there is no store."""
    if work.store is None:
        # equal dask arrays are computed to one shared buffer; a deep copy parts them
        memory = work.template.compute().copy(deep=True)
        return np.zeros(len(work.runs), dtype=bool), memory
    finished = prepare_leaf(
        work.template.chunk({"token": work.runs[0][1]}), work.store, work.key, work.leaf,
        settings=settings, overwrite=overwrite,
        grid={"layer": [(0, work.template.sizes["layer"])], "token": work.runs},
    )[0]  # fmt: skip
    return finished, work.template


def _spread(work: Work, todo: list[int], client: Any, bar: Any, each: int) -> Any:
    """Yield (unit, its values or None where they went to the store), here or over workers."""
    if client is None:
        for number in todo:
            yield number, _unit(work, number, bar)
        return
    from dask.distributed import as_completed

    # The model and the residuals travel once to each worker, not with every unit.
    everywhere = client.scatter(work, broadcast=True, hash=False)
    futures = {client.submit(_unit, everywhere, number, pure=False): number for number in todo}
    try:
        for future in as_completed(futures):
            number = futures[future]
            yield number, future.result()
            bar.update((work.runs[number][1] - work.runs[number][0]) * each)
    finally:
        client.cancel(list(futures))


def _unit(work: Work, number: int, bar: Any = None) -> dict[str, np.ndarray] | None:
    values = _measure(work, number, bar)
    if work.store is None:
        return values
    _write(work, number, values)
    return None


def _measure(work: Work, number: int, bar: Any) -> dict[str, np.ndarray]:
    start, stop = work.runs[number]
    shared, token = work.shared, slice(start, stop)
    given = Inputs(
        ids=torch.from_numpy(shared.token_id[token].reshape(-1, shared.length)),
        start=start,
        residual=lambda c, layer: shared.residual[c, layer, token].values,
        donors=lambda c, layer: _donors(shared, c, layer),
        pools=shared.pools,
        masks={mode: mask[:, token] for mode, mask in shared.masks.items()},
        n_classes=shared.residual.sizes["function_class"],
    )
    tick: Callable[[], Any] = (lambda: bar.update(stop - start)) if bar is not None else (lambda: 0)
    with MODEL_LOCK:
        values = damage_of_windows(work.model, given, work.ask, tick)
    if work.labelled:
        return values
    per_rule = {*work.ask.measures, "downstream", *(f"{n}_control" for n in work.ask.measures)}
    return {name: v[:, :, 0] if name in per_rule else v for name, v in values.items()}


def _donors(shared: Shared, c: int, layer: int) -> np.ndarray:
    if (c, layer) not in shared.donors:
        residual = shared.residual[c, layer].isel(token=shared.pools[layer])
        shared.donors[c, layer] = np.asarray(residual.values)
    return shared.donors[c, layer]


def _first_unit(work: Work, memory: xr.Dataset, bar: Any) -> None:
    """The first unit, and with it what is computed from all of them."""
    values, ask, shared = _measure(work, 0, bar), work.ask, work.shared
    stored = memory
    if work.store is not None:
        stored = open_leaf(work.store, work.key, work.leaf, incomplete="ignore")
    rest = stored.isel(token=slice(work.runs[0][1], None))
    values["damage_ratio"] = _ratio_of_means(values, rest, ask.control_measures[0])
    values["participation_ratio"] = np.array([[
        [participation_ratio(_donors(shared, c, layer)) for layer in range(len(ask.layers))]
        for c in range(shared.residual.sizes["function_class"])
    ]])  # fmt: skip
    ids = torch.from_numpy(shared.token_id[: work.runs[0][1]].reshape(-1, shared.length))
    floor = "kl" if ask.model_has_head else "state_distance"
    with MODEL_LOCK:
        replay, floors = replay_floors(work.model, ids, ask, floor)
    values["replay_difference"] = np.array([replay])
    values[f"{floor}_floor"] = np.array([[floors[mode] for mode in ask.positions]])
    if work.store is None:
        _keep(memory, values, slice(*work.runs[0]))
    else:
        _write(work, 0, values)


def _ratio_of_means(first: Mapping[str, np.ndarray], rest: xr.Dataset, name: str) -> np.ndarray:
    """Mean over mean of each control: (model, function_class, …, positions, control, layer)."""
    real = np.nansum(first[name], axis=-1) + rest[name].sum("token").values
    drawn = np.nansum(first[f"{name}_control"], axis=-1)
    drawn = drawn + rest[f"{name}_control"].sum("token").values
    control = drawn.mean(axis=-2)  # over draws: every token has all of them
    real = np.broadcast_to(np.expand_dims(real, -2), control.shape)
    return np.divide(real, control, out=np.full(control.shape, np.nan), where=control > 0)


def _keep(memory: xr.Dataset, values: Mapping[str, np.ndarray], token: slice) -> None:
    for name, region in _regions(memory, values, token).items():
        memory[name].values[region] = values[name]


def _write(work: Work, number: int, values: Mapping[str, np.ndarray]) -> None:
    assert work.store is not None
    regions = _regions(work.template, values, slice(*work.runs[number]))
    write_unit(work.store, work.key, work.leaf, (0, number), values, regions)


def _regions(
    template: xr.Dataset, values: Mapping[str, np.ndarray], token: slice
) -> dict[str, tuple[slice, ...]]:
    return {
        name: tuple(token if dim == "token" else slice(None) for dim in template[name].dims)
        for name in values
    }


def _only_first_left(work: Work) -> bool:
    """Whether every unit but the first is finished, whoever did it."""
    if work.store is None:
        return True
    done = np.asarray(open_group(work.store, f"{work.key}/{work.leaf}")[LEDGER][...])[0] > 0
    return bool(done[1:].all() and not done[0])
