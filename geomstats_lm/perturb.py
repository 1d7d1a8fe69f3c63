"""How much does the model's output suffer when a layer is replaced by its tokenwise part?

Runs the model with ``h_l`` replaced by ``T_l(h_{l-1}) = h_l - r_l`` and, as a control, with
another token's residual rescaled to the token's own norm; ``damage_ratio`` is the ratio of the
mean damage of the two.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import torch
import xarray as xr

from geomstats_lm.blocks import LanguageModel, appends_exactly, capture
from geomstats_lm.controls import CONTROLS, control_residuals, donor_pool
from geomstats_lm.cube import (
    finish_leaf,
    open_leaf,
    ordered,
    prepare_leaf,
    progress_bar,
    settings_of,
    token_runs,
    write_unit,
)
from geomstats_lm.decompose import decompose
from geomstats_lm.divergence import MEASURES, clean_output, compare_outputs, take_rows
from geomstats_lm.geometry import usable_tokens
from geomstats_lm.models import parameter_checksum
from geomstats_lm.patching import patch_all, patch_single

POSITIONS = ("all", "single")
KEEP_BYTES = 1 << 30  # residuals up to this size are read once and kept
LOGITS_AT_ONCE = 1 << 24  # bounds the windows of a batch where the vocabulary is large

LONG_NAMES = {
    "kl": "KL divergence of the patched from the clean output",
    "top1_changed": "whether the most likely next token changed",
    "loss_change": "change of the loss of the next token",
    "kl_control": "KL divergence under the control",
    "patched": "whether the token was patched",
    "damage_ratio": "mean KL over mean KL of the control",
}


def perturb(
    model: LanguageModel,
    data: xr.DataTree | xr.Dataset,
    *,
    function_class: str | Sequence[str] = "affine",
    layers: Sequence[int] | None = None,
    positions: Sequence[str] = POSITIONS,
    n_single: int = 8,
    controls: Sequence[str] = ("exchanged",),
    draws: int = 1,
    batch_size: int = 16,
    seed: int = 0,
    store: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Replace layers by their tokenwise approximation and measure the damage to the output.

    Parameters
    ----------
    model : LanguageModel
        The model that the decomposition belongs to.
    data : xarray.DataTree or xarray.Dataset
        The model's node of a study, or a decomposition; the tokenwise parts are computed with
        default settings when the node has none.
    function_class : str or sequence of str
        Labels of the approximations to try.
    layers : sequence of int, optional
        Layers 1..L to patch, one at a time; all by default.
    positions : sequence of {"all", "single"}
        Patch all usable tokens of a window at once, or one position at a time and measure the
        output at that position.  They answer different questions.
    n_single : int
        Positions per window, drawn at random among the usable ones, for ``"single"``.
    controls : sequence of {"exchanged", "gaussian", "isotropic"}
        What takes the residual's place at the same norm: another token's residual of the same
        layer, noise with the residuals' covariance, isotropic noise.
    draws : int
        Draws of each control.
    batch_size : int
        Windows per forward pass at most.
    seed : int
        Of positions and controls.
    store : str or Path, optional
        Study to write the leaf ``perturbation`` to, resumably.
    overwrite : bool
        Replace a perturbation that was made with other settings.
    progress : bool
        Show a progress bar.

    Returns
    -------
    xarray.Dataset
        ``kl`` and ``loss_change`` in nats, ``top1_changed`` (model, function_class, positions,
        layer, token), ``kl_control`` with control and draw besides, ``patched`` (model, positions,
        layer, token) and ``damage_ratio`` (model, function_class, positions, control, layer).
        Tokens not patched (first of a window, special, massive at the layer, not sampled) are
        NaN.

    Raises
    ------
    ValueError
        If the model has no language-model head or is not causal, is not the one the activations
        came from, or an argument is not among what is accepted.

    Examples
    --------
    >>> from geomstats_lm import decompose, extract
    >>> from geomstats_lm.datasets import example_corpus, load_example
    >>> model = load_example("gpt2")
    >>> cut = dict(length=32, n_windows=(12, 2), progress=False)
    >>> parts = decompose(extract(model, example_corpus(), **cut), ["mean"], k=4)
    >>> damage = perturb(model, parts, function_class="mean", progress=False)
    >>> dict(damage.kl.sizes)["positions"]
    2
    """
    classes = [function_class] if isinstance(function_class, str) else list(function_class)
    _check_arguments(model, positions, controls, n_single, draws)
    parts = _tokenwise_parts(data, classes)
    if parts.attrs.get("parameter_checksum", "") not in ("", parameter_checksum(model)):
        raise ValueError(
            f"model: the parameters of {model.name} are not those the activations were extracted "
            "with (another checkpoint, or another dtype?)"
        )
    chosen = [int(v) for v in (parts.layer.values if layers is None else layers)]
    unknown = sorted(set(chosen) - {int(v) for v in parts.layer.values})
    if unknown or not chosen:
        raise ValueError(f"layers={layers}: accepted are {parts.layer.values.tolist()}")
    parts = parts.sel(layer=chosen)
    key = str(parts.model.values[0])
    length = int(parts.attrs["window_length"])
    n_tokens = parts.sizes["token"]
    windows_at_once = max(1, min(batch_size, LOGITS_AT_ONCE // (length * model.vocabulary)))
    settings = {
        "function_class": classes, "layers": chosen, "positions": list(positions),
        "n_single": n_single, "controls": list(controls), "draws": draws, "seed": seed,
        "decomposition": settings_of(parts),
    }  # fmt: skip
    template = _template(parts, classes, positions, controls, draws)
    runs = token_runs(n_tokens, windows_at_once * length)
    save, finished, stored = _sink(template, store, key, settings, runs, overwrite)
    usable = usable_tokens(parts)[0].values
    sampled = _sample_positions(usable, length, n_single, seed)
    masks = {mode: usable if mode == "all" else usable & sampled for mode in positions}
    pools = [donor_pool(row, np.random.default_rng([seed, 1])) for row in usable]
    damage = functools.partial(
        _damage, model, parts, masks, _donors(parts, pools), pools, controls=controls,
        draws=draws, seed=seed, batch_size=batch_size,
        appends="single" in masks and not all(finished) and _appends(model, parts, length),
    )  # fmt: skip
    since, work = time.time(), len(chosen) * len(classes)
    with progress_bar(
        progress, n_tokens * work, f"{key} perturbation",
        initial=work * sum(b - a for done, (a, b) in zip(finished, runs) if done),
    ) as bar:  # fmt: skip
        # The first unit also holds what needs all tokens, so it comes last.
        for number in [*range(1, len(runs)), 0]:
            if finished[number]:
                continue
            start, stop = runs[number]
            values = damage(start, stop, bar=bar)
            if number == 0:
                rest = stored().isel(token=slice(stop, None))
                values["damage_ratio"] = _damage_ratio(values, rest)
            save(number, values, slice(start, stop))
    if store is None:
        return stored()
    finish_leaf(store, key, "perturbation", since=since)
    return open_leaf(store, key, "perturbation")


def _damage(
    model: LanguageModel,
    parts: xr.Dataset,
    masks: Mapping[str, np.ndarray],
    donors: Callable[[int, int], np.ndarray],
    pools: Sequence[np.ndarray],
    start: int,
    stop: int,
    *,
    controls: Sequence[str],
    draws: int,
    seed: int,
    appends: bool,
    batch_size: int,
    bar: Any,
) -> dict[str, np.ndarray]:
    """Damage of one run of windows: every layer, class, position mode, control and draw."""
    length, token = int(parts.attrs["window_length"]), slice(start, stop)
    ids = _ids(parts, token, length)
    states, logits = capture(model, ids)
    assert logits is not None
    target = torch.full_like(ids, -1)
    target[:, :-1] = ids[:, 1:]
    clean = clean_output(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
    residuals = parts["residual"].isel(model=0, token=token)
    n_class, n_layer = residuals.sizes["function_class"], residuals.sizes["layer"]
    shape, tail = (1, n_class, len(masks)), (n_layer, stop - start)
    out = {name: np.full((*shape, *tail), np.nan) for name in MEASURES}
    out["kl_control"] = np.full((*shape, len(controls), draws, *tail), np.nan)
    out["patched"] = np.stack([mask[:, token] for mask in masks.values()])[None]
    for layer, c in itertools.product(range(n_layer), range(n_class)):
        number = int(parts.layer.values[layer])
        own = np.asarray(residuals[c, layer].values, dtype=np.float64)
        variants = [own]
        for (k, control), draw in itertools.product(enumerate(controls), range(draws)):
            drawn = []
            for begin in range(start, stop, length):
                # seeded by the window, so that the draw does not depend on the batches
                rng = np.random.default_rng([seed, 2, number, c, k, draw, begin // length])
                window = own[begin - start : begin - start + length]
                drawn.append(
                    control_residuals(control, window, donors(c, layer), pools[layer], begin, rng)
                )
            variants.append(np.concatenate(drawn))
        for p, mode in enumerate(masks):
            mask = masks[mode][layer, token]
            given = (model, ids, number, states[number], variants, mask)
            patched = (
                patch_all(*given)
                if mode == "all"
                else patch_single(*given, appends=appends, batch_size=batch_size)
            )
            kept = take_rows(clean, torch.from_numpy(np.flatnonzero(mask)))
            for v, rows in enumerate(patched):
                measured = compare_outputs(kept, rows)
                if v == 0:
                    for name in MEASURES:
                        out[name][0, c, p, layer, mask] = measured[name].cpu().numpy()
                else:
                    k, draw = divmod(v - 1, draws)
                    out["kl_control"][0, c, p, k, draw, layer, mask] = measured["kl"].cpu().numpy()
        bar.update(stop - start)
    return out


def _ids(parts: xr.Dataset, token: slice, length: int) -> torch.Tensor:
    return torch.from_numpy(parts.token_id.values[token].reshape(-1, length).astype(np.int64))


def _donors(parts: xr.Dataset, pools: Sequence[np.ndarray]) -> Callable[[int, int], np.ndarray]:
    """Residuals of the tokens that controls draw from, read once per class and layer."""
    residual = parts["residual"].isel(model=0)

    @functools.cache
    def read(index: int, layer: int) -> np.ndarray:
        return np.asarray(residual[index, layer].isel(token=pools[layer]).values)

    return read


def _check_arguments(
    model: LanguageModel,
    positions: Sequence[str],
    controls: Sequence[str],
    n_single: int,
    draws: int,
) -> None:
    for name, given, accepted in (
        ("positions", positions, POSITIONS), ("controls", controls, tuple(CONTROLS)),
    ):  # fmt: skip
        if isinstance(given, str) or not given or set(given) - set(accepted):
            raise ValueError(f"{name}={given!r}: accepted is a sequence of {', '.join(accepted)}")
    if n_single < 1 or draws < 1:
        raise ValueError(f"n_single={n_single}, draws={draws}: both must be at least 1")
    if not model.vocabulary:
        raise ValueError(
            f"model: {model.name} has no language-model head, so it has no output to perturb"
        )
    if not model.causal:
        raise ValueError(
            f"model: {model.name} is not causal (later tokens change earlier states), so patching "
            "a position has no defined effect on its next-token output"
        )


def _tokenwise_parts(data: xr.DataTree | xr.Dataset, classes: list[str]) -> xr.Dataset:
    if isinstance(data, xr.DataTree):
        if "decomposition" in data.children:
            parts = data["decomposition"].to_dataset()
        else:
            parts = decompose(data, classes=classes)
    else:
        parts = data
    if "residual" not in parts:
        raise ValueError(f"data: it has no variable 'residual', only {list(parts)}")
    known = [str(v) for v in parts.function_class.values]
    unknown = [c for c in classes if c not in known]
    if unknown:
        raise ValueError(f"function_class={unknown}: the decomposition holds {known}")
    needed = [n for n in ("residual", "is_massive") if n in parts]
    parts = parts[needed].sel(function_class=classes)
    parts = parts.map(lambda v: v.transpose(*ordered(v.dims)), keep_attrs=True)
    # Small parts are kept, so that a lazy decomposition is computed once and not once a batch.
    return parts.load() if parts.nbytes <= KEEP_BYTES else parts


def _appends(model: LanguageModel, parts: xr.Dataset, length: int) -> bool:
    ids = _ids(parts, slice(0, length), length)
    return appends_exactly(model, ids, capture(model, ids)[0])


def _sample_positions(usable: np.ndarray, length: int, n_single: int, seed: int) -> np.ndarray:
    """True at up to ``n_single`` positions of every window that are usable at some layer."""
    rng = np.random.default_rng([seed, 0])
    order: np.ndarray = rng.random((usable.shape[1] // length, length))
    order[~usable.any(axis=0).reshape(-1, length)] = np.inf
    rank = order.argsort(axis=1).argsort(axis=1)
    return ((rank < n_single) & np.isfinite(order)).ravel()


def _template(
    parts: xr.Dataset,
    classes: list[str],
    positions: Sequence[str],
    controls: Sequence[str],
    draws: int,
) -> xr.Dataset:
    sizes = {
        "model": 1, "function_class": len(classes), "positions": len(positions),
        "control": len(controls), "draw": draws, "layer": parts.sizes["layer"],
        "token": parts.sizes["token"],
    }  # fmt: skip
    dims = {
        **dict.fromkeys(MEASURES, ("model", "function_class", "positions", "layer", "token")),
        "kl_control": tuple(sizes),
        "patched": ("model", "positions", "layer", "token"),
        "damage_ratio": ("model", "function_class", "positions", "control", "layer"),
    }
    variables = {}
    for name, own in dims.items():
        dtype, fill = (bool, False) if name == "patched" else (np.float64, np.nan)
        shape = [sizes[d] for d in own]
        chunks = [min(s, 1 << 16) if d == "token" else s for d, s in zip(own, shape)]
        units = {"units": "nat"} if name.startswith(("kl", "loss")) else {}
        variables[name] = (
            own,
            da.full(shape, fill, dtype=dtype, chunks=chunks),
            {"long_name": LONG_NAMES[name], **units},
        )
    coords = {name: c for name, c in parts.coords.items() if name != "function_class"}
    coords["function_class"] = classes
    coords["positions"], coords["control"] = list(positions), list(controls)
    coords["draw"] = np.arange(draws)
    attrs = {k: v for k, v in parts.attrs.items() if k != "settings"}
    return xr.Dataset(variables, coords, attrs)


def _sink(
    template: xr.Dataset,
    store: str | Path | None,
    key: str,
    settings: dict[str, Any],
    runs: list[tuple[int, int]],
    overwrite: bool,
) -> tuple[Callable[..., None], np.ndarray, Callable[[], xr.Dataset]]:
    """How to save a unit, which are finished, and how to get at what is saved."""

    def regions(values: Mapping[str, np.ndarray], token: slice) -> dict[str, tuple[slice, ...]]:
        return {
            name: tuple(token if dim == "token" else slice(None) for dim in template[name].dims)
            for name in values
        }

    if store is None:
        # equal dask arrays are computed to one shared buffer; a deep copy parts them
        memory = template.compute().copy(deep=True)

        def keep(number: int, values: dict[str, np.ndarray], token: slice) -> None:
            for name, region in regions(values, token).items():
                memory[name].values[region] = values[name]

        return keep, np.zeros(len(runs), dtype=bool), lambda: memory
    finished = prepare_leaf(
        template.chunk({"token": runs[0][1]}), store, key, "perturbation", settings=settings,
        grid={"layer": [(0, template.sizes["layer"])], "token": runs}, overwrite=overwrite,
    )[0]  # fmt: skip

    def write(number: int, values: dict[str, np.ndarray], token: slice) -> None:
        write_unit(store, key, "perturbation", (0, number), values, regions(values, token))

    return write, finished, lambda: open_leaf(store, key, "perturbation", incomplete="ignore")


def _damage_ratio(first: Mapping[str, np.ndarray], rest: xr.Dataset) -> np.ndarray:
    """Mean KL over mean KL of each control: (model, function_class, positions, control, layer)."""
    real = np.nansum(first["kl"], axis=-1) + rest["kl"].sum("token").values
    control = np.nansum(first["kl_control"], axis=-1) + rest["kl_control"].sum("token").values
    control = control.mean(axis=4)  # over draws: every token has all of them
    real = np.broadcast_to(real[:, :, :, None], control.shape)
    return np.divide(real, control, out=np.full(control.shape, np.nan), where=control > 0)
