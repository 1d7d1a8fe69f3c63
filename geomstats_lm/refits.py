"""What would the geometry be of maps fitted where there is nothing, or too much, to learn?

``permuted``: maps fitted to updates of other tokens, ``D'_i = D_pi(i)``; ``random_neighbours``:
local maps fitted to k reference tokens drawn at random; ``untrained``: fresh weights; ``leak``: a
token among its own neighbours, which makes a fit interpolate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from geomstats_lm.class_labels import FunctionClass, parse_classes
from geomstats_lm.cube import ordered
from geomstats_lm.decompose import TOKEN_COORDS, _reference_rows, decompose
from geomstats_lm.function_classes import Neighbourhoods, local_predictions
from geomstats_lm.geometry import decomposition_of, how_decomposed, measure, usable_tokens
from geomstats_lm.layer_fits import MASSIVE
from geomstats_lm.neighbours import nearest, search_space, to_search_space

WITHIN = ("layer", "token_id")


def permuted(
    data: xr.DataTree,
    *,
    within: str = "layer",
    draws: int = 1,
    subspace: xr.Dataset | None = None,
    exclude: bool = True,
    seed: int = 0,
    model: Any = None,
) -> xr.Dataset:
    """The geometry after updates were exchanged between tokens, everything fitted anew.

    Parameters
    ----------
    data : xarray.DataTree
        A model's node of a study, with activations and decomposition.
    within : {"layer", "token_id"}
        Exchange among all tokens of a layer, or among those with the same token id: then what the
        token id alone tells of the update is left.  Always within reference and evaluation.
    draws : int
        How often.
    subspace : xarray.Dataset, optional
        From :func:`dominant_subspaces`, for the energies.
    exclude : bool
        NaN at tokens that are left out of statistics.
    seed : int
    model : LanguageModel, optional
        For the class ``self_only``.

    Returns
    -------
    xarray.Dataset
        The variables of :func:`geomstats_lm.geometry` with a leading dim ``null``, and ``draw``.

    Raises
    ------
    ValueError
        If the node lacks activations or decomposition, or an argument is out of range.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node
    >>> permuted(example_node()).sizes["null"]
    1
    """
    if within not in WITHIN:
        raise ValueError(f"within={within!r}: accepted are {', '.join(map(repr, WITHIN))}")
    _check_draws(draws)
    activations, decomposition = _both(data)
    how = how_decomposed(decomposition)
    layers = how.pop("layers")
    results = []
    for draw in range(draws):
        parts = []
        for layer in layers:
            order = exchanges(activations, within, np.random.default_rng([seed, draw, layer]))
            pair = activations[["hidden"]].sel(layer=[layer - 1, layer])
            before = pair.hidden.isel(layer=0, drop=True)
            update = pair.hidden.isel(layer=1, drop=True) - before
            moved = update.isel(token=order).drop_vars("token", errors="ignore")
            moved = moved.assign_coords(dict(before.coords.items()))
            states = xr.concat([before, before + moved], pair.layer)
            states = states.transpose(*pair.hidden.dims).assign_coords(pair.hidden.coords)
            changed = pair.assign(hidden=states).assign_attrs(activations.attrs)
            parts.append(
                decompose(changed, **how, layers=[layer], keep=("state", "update", "tokenwise"),
                          model=model)
            )  # fmt: skip
        fitted = xr.concat(parts, "layer", combine_attrs="override")
        results.append(measure(fitted, usable_tokens(fitted), exclude=exclude, space=subspace))
    name = "permuted" if within == "layer" else f"permuted[within={within}]"
    return _named(results, name, decomposition, seed)


def random_neighbours(
    data: xr.DataTree,
    *,
    draws: int = 1,
    subspace: xr.Dataset | None = None,
    exclude: bool = True,
    seed: int = 0,
) -> xr.Dataset:
    """The geometry of local maps fitted on k random reference tokens in place of the nearest.

    Parameters
    ----------
    data, draws, subspace, exclude, seed
        As for :func:`permuted`.

    Returns
    -------
    xarray.Dataset
        As for :func:`permuted`, of the local classes.

    Raises
    ------
    ValueError
        If no class is local.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node
    >>> random_neighbours(example_node()).sizes["null"]
    1
    """
    _check_draws(draws)
    return _refitted(data, "random_neighbours", draws, subspace, exclude, seed)


def leak(
    data: xr.DataTree, *, subspace: xr.Dataset | None = None, exclude: bool = True
) -> xr.Dataset:
    """The geometry of local maps with the token itself among its k neighbours.

    Never a result: it shows how much of a published value such a leak would explain.

    Parameters
    ----------
    data, subspace, exclude
        As for :func:`permuted`.

    Returns
    -------
    xarray.Dataset
        As for :func:`permuted`, of the local classes, one draw.

    Raises
    ------
    ValueError
        If no class is local.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node
    >>> leak(example_node()).sizes["null"]
    1
    """
    return _refitted(data, "leak", 1, subspace, exclude, 0)


def untrained(
    model: Any,
    data: xr.DataTree,
    *,
    draws: int = 1,
    subspace: int | float | None = None,
    exclude: bool = True,
    seed: int = 0,
    batch_size: int = 16,
) -> xr.Dataset:
    """The geometry of the same architecture with fresh weights, the whole pipeline run anew.

    Parameters
    ----------
    model : LanguageModel
    data : xarray.DataTree
        As for :func:`permuted`; its windows are read again.
    draws : int
        Sets of fresh weights.
    subspace : int or float, optional
        Size of the fresh model's own dominant subspaces.
    exclude, seed
        As for :func:`permuted`.
    batch_size : int
        Windows per forward pass.

    Returns
    -------
    xarray.Dataset
        As for :func:`permuted`, under the trained model's key.

    Raises
    ------
    ValueError
        If tokens of the windows were not kept at extraction.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node, load_example
    >>> model = load_example("gpt2")
    >>> untrained(model, example_node(model=model)).sizes["null"]
    1
    """
    from geomstats_lm.dominant import dominant_subspaces
    from geomstats_lm.extract import extract
    from geomstats_lm.models import untrained_model

    _check_draws(draws)
    activations, decomposition = _both(data)
    if activations.attrs.get("n_tokens_left_out", 0):
        raise ValueError(
            "data: tokens were left out at extraction, so windows cannot be read again"
        )
    labels = {n: c.variable for n, c in activations.coords.items() if c.dims == ("token",)}
    windows = xr.Dataset(coords=labels, attrs=activations.attrs)
    how = how_decomposed(decomposition)
    results = []
    for draw in range(draws):
        fresh = untrained_model(model, seed=seed + draw)
        states = extract(fresh, windows, batch_size=batch_size, progress=False)
        run = activations.hidden.chunks[2] if activations.hidden.chunks else -1
        states = states.chunk({"layer": 1, "token": run})
        keep = ("state", "update", "tokenwise")
        fitted = decompose(states, **how, keep=keep, model=fresh)
        space = None
        if subspace is not None:
            reference = decompose(states, **how, tokens="reference", keep=keep, model=fresh)
            space = dominant_subspaces(reference, subspace, parts=["tokenwise"])
        one = measure(fitted, usable_tokens(fitted), exclude=exclude, space=space)
        results.append(one.assign_coords(model=activations.model))
    return _named(results, "untrained", decomposition, seed)


def exchanges(activations: xr.Dataset, within: str, rng: np.random.Generator) -> np.ndarray:
    """Which token's update each token gets: a permutation within its group, (token,) int.

    Tokens that are first of a window or special keep their own.
    """
    split = activations["split"].values.astype(np.int64)
    fixed = (activations["position"].values == 0) | activations["is_special"].values.astype(bool)
    group = split if within == "layer" else split + 2 * activations["token_id"].values
    group = np.where(fixed, -1, group)
    order = np.arange(len(group))
    shuffled = rng.permutation(len(group))
    # both sorted by group: the i-th member of a group takes from the i-th shuffled one
    own = np.argsort(group, kind="stable")
    taken = shuffled[np.argsort(group[shuffled], kind="stable")]
    order[own] = taken
    return np.where(fixed, np.arange(len(group)), order)


def _refitted(
    data: xr.DataTree, name: str, draws: int, subspace: xr.Dataset | None, exclude: bool, seed: int
) -> xr.Dataset:
    activations, decomposition = _both(data)
    how = how_decomposed(decomposition)
    classes = [c for c in parse_classes(how["classes"]) if c.scope == "local"]
    if any(c["ridge"] == "cv" for c in classes):
        classes = [c for c in classes if c["ridge"] != "cv"]
    if not classes:
        raise ValueError(
            f"{name}: none of the classes {how['classes']} is local with a fixed ridge"
        )
    labels = {n: activations[n].values for n in TOKEN_COORDS}
    rows = _reference_rows(labels, how["reference"], how["seed"])
    every = _reference_rows(labels, None, 0)
    kept = decomposition.sel(function_class=[c.label for c in classes])
    usable = usable_tokens(kept)
    results = []
    for draw in range(draws):
        layers = []
        for layer in how["layers"]:
            rng = None if name == "leak" else [seed, draw, layer]
            states = [
                dask.delayed(_values)(activations.hidden.sel(layer=at).data)
                for at in (layer - 1, layer)
            ]
            query = dask.delayed(_values)(kept.state.sel(layer=layer).data)
            own = dask.delayed(_values)(kept["update"].sel(layer=layer).data)
            fit = partial(
                refit_layer, classes=classes, rows=rows, median_rows=every, how=how, seed=rng
            )
            shape = (len(classes), *kept.state.shape[2:])
            fitted = da.from_delayed(dask.delayed(fit)(*states, query, own), shape, np.float32)
            layers.append(fitted[None, :, None])
        dims = ("model", "function_class", "layer", "token", "dim")
        refitted = kept.assign(tokenwise=(dims, da.concatenate(layers, axis=2)))
        results.append(measure(refitted, usable, exclude=exclude, space=subspace))
    return _named(results, name, decomposition, seed)


def refit_layer(
    before: np.ndarray,
    after: np.ndarray,
    queries: np.ndarray,
    updates: np.ndarray,
    *,
    classes: list[FunctionClass],
    rows: np.ndarray,
    median_rows: np.ndarray,
    how: Mapping[str, Any],
    seed: list[int] | None,
) -> np.ndarray:
    """Tokenwise parts of local maps whose neighbours were chosen at random, or hold the token.

    Parameters
    ----------
    before, after : numpy.ndarray, shape (N, d)
        States of all tokens before and after the block.
    queries, updates : numpy.ndarray, shape (n, d)
        States and updates of the tokens to fit.
    classes : list of FunctionClass
        Local ones.
    rows, median_rows : numpy.ndarray of int
        Tokens that may be references, and whose norms have the median.
    how : mapping
        ``k``, ``target``, ``metric``.
    seed : list of int, optional
        Of the random neighbours; None puts the token among its nearest ones.

    Returns
    -------
    numpy.ndarray of float32, shape (classes, n, d)
    """
    keep = np.ones(len(rows), dtype=bool)
    for states in (before, after):
        norms = np.linalg.norm(states.astype(float), axis=1)
        keep &= norms[rows] <= MASSIVE * np.median(norms[median_rows])
    chosen = rows[keep]
    reference = np.asarray(before[chosen], np.float32)
    update = np.asarray(after[chosen], np.float32) - reference
    centre = reference.mean(axis=0, dtype=np.float64).astype(np.float32)
    states, x = reference - centre, np.asarray(queries, np.float32) - centre
    targets = update if how["target"] == "update" else update + reference
    size = max(int(c["k"] or how["k"]) for c in classes)
    if seed is None:
        space = search_space(how["metric"], states)
        points = to_search_space(space, states)
        indices = np.arange(len(states), len(states) + len(x))[:, None]  # the token itself, first
        if size > 1:
            near = nearest(to_search_space(space, x), points, size - 1)[0]
            indices = np.concatenate([indices, near], axis=1)
        own = updates if how["target"] == "update" else updates + queries
        states = np.concatenate([states, x])
        targets = np.concatenate([targets, np.asarray(own, np.float32)])
    else:
        indices = random_rows(len(x), len(states), size, np.random.default_rng(seed))
    distances = np.stack(
        [np.linalg.norm(states[rows] - one, axis=1) for rows, one in zip(indices, x)]
    )
    order = np.argsort(distances, axis=1, kind="stable")
    data = Neighbourhoods(
        x, np.take_along_axis(indices, order, 1),
        np.take_along_axis(distances, order, 1).astype(np.float32), states, centre,
        np.ascontiguousarray(targets),
    )  # fmt: skip
    predicted = local_predictions(classes, data, k=how["k"], target=how["target"])[0]
    return predicted if how["target"] == "update" else predicted - np.asarray(queries, np.float32)


def random_rows(n: int, size: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """k distinct numbers below ``size`` in each of n rows, uniformly: (n, k) int64."""
    if k > size:
        raise ValueError(f"k={k}: only {size} reference tokens are there")
    result = rng.integers(size, size=(n, k))
    while True:
        ordered = np.sort(result, axis=1)
        doubled = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not doubled.size:
            return result
        if k * k > size:  # hardly a draw would be free of doubles
            result[doubled] = [rng.choice(size, k, replace=False) for _ in doubled]
        else:
            result[doubled] = rng.integers(size, size=(len(doubled), k))


def _both(data: xr.DataTree) -> tuple[xr.Dataset, xr.Dataset]:
    missing = [
        n for n in ("activations", "decomposition")
        if not isinstance(data, xr.DataTree) or n not in data.children
    ]  # fmt: skip
    if missing:
        raise ValueError(
            f"data: a model's node of a study is needed (or xarray.DataTree.from_dict of both), "
            f"with {' and '.join(missing)}"
        )
    return data["activations"].to_dataset(), decomposition_of(data)


def _check_draws(draws: int) -> None:
    if not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ValueError(f"draws={draws!r}: accepted are integers >= 1")


def _named(
    results: list[xr.Dataset], name: str, decomposition: xr.Dataset, seed: int
) -> xr.Dataset:
    result = xr.concat(results, "draw", data_vars="all", coords="minimal", compat="override",
                       combine_attrs="override")  # fmt: skip
    result = result.map(lambda v: v.transpose(*ordered(v.dims)), keep_attrs=True)
    result = result.expand_dims(null=[name])
    attrs = {k: v for k, v in decomposition.attrs.items() if k != "settings"}
    result.attrs = {**attrs, "seed": seed, "draws": len(results)}
    return result


def _values(array: Any) -> np.ndarray:
    """The one model's states (n, d) of a layer."""
    return np.asarray(array)[0]
