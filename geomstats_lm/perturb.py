"""How much does the model's output suffer when a layer is replaced by its tokenwise part?

Runs the model with ``h_l`` replaced by ``T_l(h_{l-1}) = h_l - r_l``, or by what ``replace=`` says,
and, as a control, with another token's residual rescaled to the norm of what was taken off;
``damage_ratio`` is the ratio of the mean damage of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from geomstats_lm.blocks import LanguageModel, appends_exactly, capture
from geomstats_lm.controls import CONTROLS, donor_pool
from geomstats_lm.cube import ordered, settings_of, token_runs
from geomstats_lm.decompose import decompose
from geomstats_lm.divergence import (
    HEADLESS_MEASURES,
    MEASURES,
    OUTPUT_MEASURES,
    STATE_MEASURES,
)
from geomstats_lm.geometry import usable_tokens
from geomstats_lm.models import parameter_checksum
from geomstats_lm.output_damage import Ask
from geomstats_lm.perturbation_leaf import (
    Shared,
    Work,
    check_target,
    perturbation_template,
    run_units,
)
from geomstats_lm.replacements import replacements_of

POSITIONS = ("all", "single")
KEEP_BYTES = 1 << 30  # residuals up to this size are read once and kept


def perturb(
    model: LanguageModel,
    data: xr.DataTree | xr.Dataset,
    *,
    function_class: str | Sequence[str] = "affine",
    layers: Sequence[int] | None = None,
    replace: str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any] | None = None,
    factors: Sequence[float] | None = None,
    positions: Sequence[str] = POSITIONS,
    n_single: int | None = 8,
    measures: Sequence[str] | None = None,
    controls: Sequence[str] = ("exchanged",),
    draws: int = 1,
    control_measures: Sequence[str] | None = None,
    downstream: bool = False,
    exclude: bool = True,
    batch_size: int = 16,
    seed: int = 0,
    store: str | Path | None = None,
    leaf: str = "perturbation",
    overwrite: bool = False,
    part: tuple[int, int] | None = None,
    client: Any = None,
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
    replace : str, callable, or a sequence or mapping of these, optional
        What takes the place of ``h_l``: ``"drop"`` (the residual; the default),
        ``"drop[factor=0.5]"`` (a share of it), ``"keep_only"`` (the residual, without the
        tokenwise part), ``"swap"`` (another token's residual for its own), or functions
        ``(state, update, residual) -> new h_l`` of arrays (token, dim) in float64, the tokens of
        one window, ``state`` being h_{l-1}; those that name ``layer`` or ``rng`` get them.
        :func:`project_on` and :func:`project_off` make such functions from a subspace.
    factors : sequence of float, optional
        Shares of the residual to take off, ``h_l - factor r_l``: a dose-response curve.
    positions : sequence of {"all", "single"}
        Patch all usable tokens of a window at once, or one position at a time and measure the
        output at that position.  They answer different questions.
    n_single : int or None
        Positions per window, drawn at random among the usable ones, for ``"single"``; None for
        every position.
    measures : sequence of str, optional
        Among ``kl``, ``top1_changed``, ``loss_change`` (the default), ``reverse_kl``, ``js``,
        ``logit_l2``, ``logit_cosine``, ``rank_top1``, ``state_distance``, ``state_cosine``.  A
        model without a language-model head has the last two only, which are its default.
    controls : sequence of {"exchanged", "gaussian", "isotropic"}
        What is taken off instead, at the same norm: another token's residual of the same
        layer, noise with the residuals' covariance, isotropic noise.
    draws : int
        Draws of each control.
    control_measures : sequence of str, optional
        Which of the measures are taken of the controls too; by default the first of them.
    downstream : bool
        Measure too what patching single positions does to the later tokens of their window.
        It takes one whole window through the model per position.
    exclude : bool
        Leave tokens unpatched that statistics leave out: the first of a window, special ones,
        those massive at the layer.
    batch_size : int
        Windows per forward pass at most.
    seed : int
        Of positions and controls.
    store : str or Path, optional
        Study to write to, resumably.
    leaf : str
        Name of the leaf written, so that several perturbations of a model live side by side.
    overwrite : bool
        Replace a perturbation that was made with other settings.
    part : (int, int), optional
        ``(i, n)``: do the i-th of n parts, i = 1..n, such as one per process or machine.  Needs a
        store; what needs all tokens is computed by the part that ends last.
    client : dask.distributed.Client, optional
        Spread runs of windows over its workers, each of which holds one copy of the model.
    progress : bool
        Show a progress bar.

    Returns
    -------
    xarray.Dataset
        The measures (model, function_class, positions, layer, token), such as ``kl`` in nats;
        ``kl_control`` with control and draw besides; ``patched`` (model, positions, layer, token);
        ``downstream`` (model, function_class, layer, token), the mean KL at later tokens;
        ``damage_ratio`` (model, function_class, positions, control, layer);
        ``participation_ratio`` of the residuals (model, function_class, layer); ``kl_floor``
        (model, positions), the largest KL measured when nothing is changed, which is what the
        batch's shape does to the rounding; ``replay_difference`` (model), 0 where the model
        replayed from an unchanged state gives exactly its output.  With ``replace`` or
        ``factors`` measures have the dim ``replacement`` after function_class, with a
        coordinate ``factor``.  Tokens not patched (first of a window, special, massive at the
        layer, not sampled) are NaN.

    Raises
    ------
    ValueError
        If the model is not causal, is not the one the activations came from, lacks the head that
        a measure needs, or an argument is not among what is accepted.

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
    _check_arguments(
        model, positions=positions, controls=controls, n_single=n_single, draws=draws,
        batch_size=batch_size, downstream=downstream,
    )  # fmt: skip
    measures, control_measures = _measures_of(model, measures, control_measures)
    check_target(leaf, part, store, overwrite)
    rules = replacements_of(replace, factors)
    parts = _tokenwise_parts(data, classes)
    if parts.attrs.get("parameter_checksum", "") not in ("", parameter_checksum(model)):
        raise ValueError(
            f"model: the parameters of {model.name} are not those the activations were extracted "
            "with (another checkpoint, or another dtype?)"
        )
    chosen = _layers_of(parts, layers)
    parts = parts.sel(layer=chosen)
    key = str(parts.model.values[0])
    length = _window_length(parts)
    n_tokens = parts.sizes["token"]
    settings = {
        "function_class": classes, "layers": chosen, "replace": [rule.key for rule in rules],
        "positions": list(positions), "n_single": n_single, "measures": list(measures),
        "controls": list(controls), "draws": draws, "control_measures": list(control_measures),
        "downstream": downstream, "exclude": exclude, "seed": seed,
        "decomposition": settings_of(parts),
    }  # fmt: skip
    ask = Ask(
        tuple(chosen), tuple(rules), tuple(positions), tuple(controls), draws, tuple(measures),
        control_measures, downstream, "single" in positions and _appends(model, parts, length),
        batch_size, seed, model.vocabulary > 0,
    )  # fmt: skip
    labelled = replace is not None or factors is not None
    template = perturbation_template(parts, classes, ask, labelled=labelled)
    runs = token_runs(n_tokens, batch_size * length)
    usable = usable_tokens(parts)[0].values
    patchable = usable if exclude else np.ones_like(usable)
    sampled = _sample_positions(patchable, length, n_single, seed)
    shared = Shared(
        parts.token_id.values.astype(np.int64), length, parts["residual"].isel(model=0, drop=True),
        {mode: patchable if mode == "all" else patchable & sampled for mode in positions},
        [donor_pool(row, np.random.default_rng([seed, 1])) for row in usable], {},
    )  # fmt: skip
    work = Work(model, shared, ask, labelled, runs, template, store, key, leaf)
    return run_units(
        work, settings=settings, overwrite=overwrite, part=part, client=client, progress=progress
    )


def _check_arguments(
    model: LanguageModel,
    *,
    positions: Sequence[str],
    controls: Sequence[str],
    n_single: int | None,
    draws: int,
    batch_size: int,
    downstream: bool,
) -> None:
    for name, given, accepted in (
        ("positions", positions, POSITIONS), ("controls", controls, tuple(CONTROLS)),
    ):  # fmt: skip
        if isinstance(given, str) or not given or set(given) - set(accepted):
            raise ValueError(f"{name}={given!r}: accepted is a sequence of {', '.join(accepted)}")
    if draws < 1 or batch_size < 1 or (n_single is not None and n_single < 1):
        raise ValueError(
            f"n_single={n_single}, draws={draws}, batch_size={batch_size}: all must be at least 1"
        )
    if downstream and "single" not in positions:
        raise ValueError(
            f"downstream: it is what single positions do to later ones, so positions={positions!r} "
            "must hold 'single'"
        )
    if not model.causal:
        raise ValueError(
            f"model: {model.name} is not causal (later tokens change earlier states), so patching "
            "a position has no defined effect on its next-token output"
        )


def _measures_of(
    model: LanguageModel, measures: Sequence[str] | None, control_measures: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The measures asked for, and those of the controls, which the damage ratio comes from."""
    if measures is None:
        measures = MEASURES if model.vocabulary else HEADLESS_MEASURES
    known = [*OUTPUT_MEASURES, *STATE_MEASURES]
    if isinstance(measures, str) or not measures or set(measures) - set(known):
        raise ValueError(f"measures={measures!r}: accepted is a sequence of {', '.join(known)}")
    outputs = [name for name in measures if name in OUTPUT_MEASURES]
    if outputs and not model.vocabulary:
        raise ValueError(
            f"measures={list(measures)}: {model.name} has no language-model head; accepted are "
            f"{', '.join(HEADLESS_MEASURES)}"
        )
    if not model.gathers_rows and outputs and set(measures) & set(STATE_MEASURES):
        raise ValueError(
            f"measures={list(measures)}: the final state of {model.name} cannot be read apart from "
            f"its logits; leave out {', '.join(HEADLESS_MEASURES)}"
        )
    if control_measures is None:
        control_measures = ("kl",) if "kl" in measures else (measures[0],)
    unknown = set(control_measures) - set(measures)
    if isinstance(control_measures, str) or unknown or not control_measures:
        raise ValueError(
            f"control_measures={control_measures!r}: accepted is a sequence of {list(measures)}"
        )
    return tuple(dict.fromkeys(measures)), tuple(dict.fromkeys(control_measures))


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
    if unknown or not classes:
        raise ValueError(f"function_class={unknown}: the decomposition holds {known}")
    _window_length(parts)  # before anything is computed
    if "is_massive" not in parts:
        residual = parts["residual"]
        none = residual.isel(function_class=0, dim=0, drop=True)
        parts = parts.assign(is_massive=(none.dims, np.zeros(none.shape, dtype=bool)))
    parts = parts[["residual", "is_massive"]].sel(function_class=classes)
    parts = parts.map(lambda v: v.transpose(*ordered(v.dims)), keep_attrs=True)
    # Small parts are kept, so that a lazy decomposition is computed once and not once a batch.
    return parts.load() if parts.nbytes <= KEEP_BYTES else parts


def _layers_of(parts: xr.Dataset, layers: Sequence[int] | None) -> list[int]:
    known = [int(v) for v in parts.layer.values]
    if layers is None:
        return known
    try:
        chosen = [int(v) for v in layers]
    except (TypeError, ValueError):
        chosen = []
    if not chosen or set(chosen) - set(known) or len(set(chosen)) < len(chosen):
        raise ValueError(f"layers={layers!r}: accepted is a sequence of {known}, each once")
    return chosen


def _window_length(parts: xr.Dataset) -> int:
    """Tokens of a window; the model reads whole windows, so all of their tokens must be there."""
    length = int(parts.attrs["window_length"])
    position = parts.position.values
    if len(position) % length or (position.reshape(-1, length) != np.arange(length)).any():
        raise ValueError(
            f"data: {len(position)} tokens are not whole windows of {length}; the model reads "
            "whole windows, so decompose activations of all tokens (extract without tokens=)"
        )
    return length


def _appends(model: LanguageModel, parts: xr.Dataset, length: int) -> bool:
    ids = torch.from_numpy(parts.token_id.values[:length].reshape(1, length).astype(np.int64))
    return appends_exactly(model, ids, capture(model, ids, head=False)[0])


def _sample_positions(
    usable: np.ndarray, length: int, n_single: int | None, seed: int
) -> np.ndarray:
    """True at up to ``n_single`` positions of every window that are usable at some layer."""
    if n_single is None:
        return np.asarray(usable.any(axis=0))
    rng = np.random.default_rng([seed, 0])
    order: np.ndarray = rng.random((usable.shape[1] // length, length))
    order[~usable.any(axis=0).reshape(-1, length)] = np.inf
    rank = order.argsort(axis=1).argsort(axis=1)
    return ((rank < n_single) & np.isfinite(order)).ravel()
