"""How are the update, its tokenwise part and the residual placed to one another?

Norms, cosines and angles of ``D = t + r``, each beside the value that the size of the residual
forces by itself: with ``e = |r| / |D|`` and a right angle between r and t,
``cos(D, t) = sqrt(1 - e^2)`` and ``cos(D, r) = e``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from geomstats_lm.cube import ordered, settings_of, write_leaf
from geomstats_lm.geometry_measures import (
    CLASS_MEASURES,
    ENERGY_MEASURES,
    STATE_MEASURES,
    class_measures,
    energy_measures,
    state_measures,
)

TOKENS_PER_CHUNK = 1 << 16  # per-token numbers are small: one file holds many runs

CARRIED = (
    "n_reference", "n_reference_excluded_massive", "neighbour_distance", "same_token_fraction",
    "effective_df",
)  # fmt: skip


def geometry(
    data: xr.DataTree | xr.Dataset,
    *,
    subspace: int | float | xr.Dataset | None = None,
    centred: bool = False,
    model: Any = None,
    exclude: bool = True,
    store: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Measure the geometry of a decomposition.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or what :func:`decompose` returned: ``update`` and ``state``
        (model, layer, token, dim), ``tokenwise`` (model, function_class, layer, token, dim).
    subspace : int, float or xarray.Dataset, optional
        Adds energies in the dominant tokenwise subspace: its number of dimensions m, or the share
        of energy in (0, 1) that it holds, both of which need a node with activations since the
        subspace is that of the *reference* tokens, decomposed in addition; or what
        :func:`dominant_subspaces` returned.  By default there are no energies.
    centred : bool
        Whether that subspace, and the energies in it, are about the reference means.
    model : LanguageModel, optional
        For the subspace of the class ``self_only``.
    exclude : bool
        NaN at tokens that are left out of statistics: the first of a window, special ones, and
        those massive at the layer.  ``usable`` tells which either way.
    store : str or Path, optional
        Study to write the leaf ``geometry`` to (and ``subspace``, where one is computed).
    overwrite : bool
        Replace a geometry that was made from another decomposition.
    progress : bool
        Show a progress bar while writing.

    Returns
    -------
    xarray.Dataset
        Lazy.  Per token (model, [function_class,] layer, token): norms, ``relative_error``,
        cosines, angles in degrees, the ``forced_*`` values (NaN where e >= 1: they do not exist
        there) and, with a subspace, ``energy_update``, ``energy_tokenwise``, ``energy_residual``.
        Per layer (model, function_class, layer): ``explained``, ``r2_centred``,
        ``explained_beyond_token_mean`` (where that class is there), ``energy_share_*``, ``n`` and
        counts of tokens left out; with a subspace ``pooled_energy_*``, ``energy_forced`` = m/d
        and ``n_components``.  Sums are in float64.

    Raises
    ------
    ValueError
        If a variable that is needed is missing, or a subspace is asked for by number and there
        are no activations to take reference tokens from.

    Notes
    -----
    ``explained = 1 - sum |r|^2 / sum |D|^2`` is against no update at all, ``r2_centred = 1 - sum
    |r|^2 / sum |D - mean D|^2`` against the mean update of the reference tokens, both sums over
    usable evaluation tokens; ``explained_beyond_token_mean`` against the residual of the class
    ``token_mean``.  ``energy_share_tokenwise`` = sum |t|^2 / sum |D|^2 and so on: tokenwise,
    residual and twice their product add up to 1.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> dims = ("model", "layer", "token", "dim")
    >>> update = xr.DataArray(np.ones((1, 1, 2, 4)), dims=dims)
    >>> tokenwise = 0.5 * update.expand_dims(function_class=["half"])
    >>> data = xr.Dataset({"update": update, "state": update, "tokenwise": tokenwise})
    >>> geometry(data).relative_error.values.ravel()
    array([0.5, 0.5], dtype=float32)
    """
    decomposition = decomposition_of(data)
    single = decomposition["update"].chunks is None
    space, made = _subspace(
        data, subspace, centred=centred, model=model, store=store, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip
    usable = usable_tokens(decomposition)
    result = measure(decomposition, usable, exclude=exclude, space=space)
    settings = {"exclude": exclude, "decomposition": settings_of(decomposition), **made}
    result.attrs = {k: v for k, v in decomposition.attrs.items() if k != "settings"}
    result.attrs["dim"] = decomposition.sizes["dim"]
    result = result.chunk({"token": _run(decomposition), **_whole(result, "function_class")})
    if store is not None:
        key = str(result.model.values[0])
        return write_leaf(
            result, store, key, "geometry", settings=settings, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    return result.compute() if single else result


def beside_forced(geometry: xr.Dataset) -> xr.Dataset:
    """Observed cosines at just those tokens where the forced one exists (error below 1).

    Parameters
    ----------
    geometry : xarray.Dataset
        With cosines and their ``forced_*`` values per token.

    Returns
    -------
    xarray.Dataset
        The same, so that means of the two are over the same tokens.
    """
    pairs = {
        name: geometry[name].where(geometry[f"forced_{name}"].notnull())
        for name in ("cos_update_tokenwise", "cos_centred")
        if f"forced_{name}" in geometry
    }
    return geometry.assign(pairs)


def measure(
    decomposition: xr.Dataset,
    usable: xr.DataArray,
    *,
    exclude: bool = True,
    space: xr.Dataset | None = None,
) -> xr.Dataset:
    """Everything that :func:`geometry` returns, of updates that may depend on the class too.

    Parameters
    ----------
    decomposition : xarray.Dataset
        ``state``, ``update``, ``tokenwise``; further dims (draw, or function_class of an update)
        are kept.
    usable : xarray.DataArray of bool
        Tokens that count.
    exclude : bool
        NaN at the others.
    space : xarray.Dataset, optional
        From :func:`dominant_subspaces`.

    Returns
    -------
    xarray.Dataset
        Lazy.
    """
    lazy = decomposition.chunk({"dim": -1})
    mean = _reference(lazy, "reference_update_mean", 0.0)
    sd = _reference(lazy, "reference_state_sd", np.nan)
    vectors = [lazy.state, lazy["update"]]
    stacked = [
        (STATE_MEASURES, _measure(state_measures, STATE_MEASURES, [*vectors, mean])),
        (
            CLASS_MEASURES,
            _measure(class_measures, CLASS_MEASURES, [*vectors, lazy.tokenwise, mean, sd]),
        ),
    ]
    if space is not None:
        stacked.append((ENERGY_MEASURES, _energies(lazy, mean, space)))

    # All classes of a run of tokens before the next run: their states are let go then.  Class by
    # class, the sums over tokens would hold the states of a whole layer for the second class.
    stacked = [
        (names, v.chunk({"function_class": -1}) if "function_class" in v.dims else v)
        for names, v in stacked
    ]

    def named(masked: bool) -> dict[str, xr.DataArray]:
        # masked once for all, since every step costs the scheduler more than the arithmetic
        parts = [(names, v.where(usable) if masked else v) for names, v in stacked]
        return {n: v.isel(measure=i) for names, v in parts for i, n in enumerate(names)}

    counted = named(True)
    result = xr.Dataset(
        {
            **(counted if exclude else named(False)),
            "usable": usable,
            **_layered(lazy, counted, usable, space),
            # what tells how far a fit can be trusted goes along: N beside every error
            **{n: v for n, v in lazy.data_vars.items() if n in CARRIED},
        }
    )
    labels = {n: c for n, c in decomposition.coords.items() if n not in result.coords}
    result = result.assign_coords(labels)
    for name, (text, units) in {**STATE_MEASURES, **CLASS_MEASURES, **ENERGY_MEASURES}.items():
        if name in result:
            result[name].attrs = {"long_name": text, **({"units": units} if units else {})}
    return result.map(lambda v: v.transpose(*ordered(v.dims)), keep_attrs=True)


def _layered(
    data: xr.Dataset,
    counted: dict[str, xr.DataArray],
    usable: xr.DataArray,
    space: xr.Dataset | None,
) -> dict[str, Any]:
    """What belongs to a layer: sums of squares over its usable tokens, and counts."""

    def squares(name: str) -> xr.DataArray:
        return (counted[name].astype(float) ** 2).sum("token")

    residual, update = squares("residual_norm"), squares("update_norm")
    update = update.where(update > 0)
    centred = squares("update_centred_norm")
    tokenwise = squares("tokenwise_norm") / update
    layered = {
        "explained": 1 - residual / update,
        "r2_centred": 1 - residual / centred.where(centred > 0),
        "energy_share_tokenwise": tokenwise,
        "energy_share_residual": residual / update,
        "energy_share_product": 1 - tokenwise - residual / update,
        "n": usable.sum("token"),
        "n_massive": data.is_massive.sum("token")
        if "is_massive" in data
        else 0 * usable.sum("token"),
        "n_error_above_one": (counted["relative_error"] >= 1).sum("token"),
    }
    if "function_class" in data.coords and "token_mean" in data.function_class.values:
        floor = residual.sel(function_class="token_mean", drop=True)
        layered["explained_beyond_token_mean"] = 1 - residual / floor.where(floor > 0)
    if space is not None:
        for name, of in (
            ("update", "update"),
            ("tokenwise", "tokenwise"),
            ("residual", "residual"),
        ):
            weight = (counted[f"{of}_norm"].astype(float) ** 2).where(
                counted[f"energy_{name}"].notnull()
            )
            total = weight.sum("token")
            inside = (weight * counted[f"energy_{name}"]).sum("token")
            layered[f"pooled_energy_{name}"] = inside / total.where(total > 0)
        layered["n_components"] = space.tokenwise_components
        layered["energy_forced"] = space.tokenwise_components / data.sizes["dim"]
    return layered


def usable_tokens(data: xr.Dataset) -> xr.DataArray:
    """Tokens that statistics count: not first in their window, not special, not massive.

    Parameters
    ----------
    data : xarray.Dataset
        With token coordinates ``position`` and ``is_special`` and, if there, the variable
        ``is_massive`` (model, layer, token).

    Returns
    -------
    xarray.DataArray of bool, dims (model, layer, token)
    """
    template = data["update"].isel(dim=0, drop=True) if "update" in data else data["is_massive"]
    usable = xr.ones_like(template, dtype=bool)
    if "position" in data.coords:
        usable = usable & (data.position > 0)
    if "is_special" in data.coords:
        usable = usable & ~data.is_special
    if "is_massive" in data:
        usable = usable & ~data.is_massive
    return usable.transpose("model", "layer", "token")


def _measure(function: Any, names: dict[str, Any], arrays: list[xr.DataArray]) -> xr.DataArray:
    return xr.apply_ufunc(
        function,
        *arrays,
        input_core_dims=[["dim"]] * len(arrays),
        output_core_dims=[["measure"]],
        dask="parallelized",
        output_dtypes=[np.float32],
        dask_gufunc_kwargs={"output_sizes": {"measure": len(names)}},
    )


def _energies(data: xr.Dataset, mean: xr.DataArray, space: xr.Dataset) -> xr.DataArray:
    """``ENERGY_MEASURES`` in the dominant tokenwise subspace of each layer and class."""
    labels = {n: data[n].values for n in ("function_class", "layer") if n in data.coords}
    absent = {n: set(v.tolist()) - set(space[n].values.tolist()) for n, v in labels.items()}
    if any(absent.values()):
        raise ValueError(
            f"subspace: nothing is there for { ({n: v for n, v in absent.items() if v}) }"
        )
    space = space.sel(labels)
    centre = space.tokenwise_centre
    mean = mean if space.attrs.get("centred", 0) else 0 * mean
    # The tokenwise part comes first since it has all dims in order: then token is the last that
    # is looped over, and a block is one matrix product per layer and class.
    tokenwise = data.tokenwise.transpose(*ordered(data.tokenwise.dims))
    return xr.apply_ufunc(
        energy_measures,
        tokenwise, data["update"], space.tokenwise_basis, centre, mean,
        input_core_dims=[["dim"], ["dim"], ["component", "dim"], ["dim"], ["dim"]],
        output_core_dims=[["measure"]],
        dask="parallelized",
        join="exact",
        output_dtypes=[np.float32],
        dask_gufunc_kwargs={"output_sizes": {"measure": len(ENERGY_MEASURES)}},
    )  # fmt: skip


def _subspace(
    data: xr.DataTree | xr.Dataset,
    subspace: int | float | xr.Dataset | None,
    *,
    centred: bool,
    model: Any,
    **writing: Any,
) -> tuple[xr.Dataset | None, dict[str, Any]]:
    """The subspace to measure energies in, and what to record of it."""
    if subspace is None:
        return None, {}
    if isinstance(subspace, xr.Dataset):
        missing = [n for n in ("basis", "centre", "components") if f"tokenwise_{n}" not in subspace]
        if missing:
            raise ValueError(
                f"subspace: a Dataset from dominant_subspaces() is accepted; {missing} are missing"
            )
        return subspace, {"subspace": {"m": subspace.attrs.get("m"), "centred": centred}}
    if not isinstance(data, xr.DataTree):
        raise ValueError(
            f"subspace={subspace!r}: the subspace of the very tokens it is judged on would hold "
            "them by construction; pass the model's node with its activations, or "
            "dominant_subspaces(decompose(activations, tokens='reference'))"
        )
    from geomstats_lm.dominant import dominant_subspaces

    space = dominant_subspaces(data, subspace, centred=centred, model=model, **writing)
    return space, {"subspace": {"m": subspace, "centred": centred}}


def how_decomposed(decomposition: xr.Dataset) -> dict[str, Any]:
    """The arguments that make :func:`decompose` do the same once more, on other tokens.

    Parameters
    ----------
    decomposition : xarray.Dataset
        Stored or not; one that was not stored knows nothing of a limited reference.
    """
    made, attrs = settings_of(decomposition), decomposition.attrs
    return {
        # labels say everything that differs from the defaults
        "classes": [str(label) for label in decomposition.function_class.values],
        "layers": [int(layer) for layer in decomposition.layer.values],
        "k": int(made.get("k", attrs.get("k", 32))),
        **{
            name: made.get(name, attrs.get(name, default))
            for name, default in (
                ("target", "update"), ("metric", "euclidean"), ("exclude", "document"),
                ("reference", None), ("seed", 0),
            )
        },
    }  # fmt: skip


def decomposition_of(data: xr.DataTree | xr.Dataset) -> xr.Dataset:
    if isinstance(data, xr.DataTree):
        if "decomposition" not in data.children:
            raise ValueError(
                f"data: node {data.path} has no decomposition, only {list(data.children)}; "
                "run decompose() with the same store first"
            )
        data = data["decomposition"].to_dataset()
    missing = [name for name in ("state", "update", "tokenwise") if name not in data]
    if missing:
        raise ValueError(f"data: variables {missing} are missing; there are {list(data)}")
    return data


def labelled_like(
    decomposition: xr.Dataset, measured: xr.Dataset, long_names: Mapping[str, str]
) -> xr.Dataset:
    """Measures with their dims in order, their names in words and all coords of the tokens."""
    measured = measured.map(lambda v: v.transpose(*ordered(v.dims)))
    for name, text in long_names.items():
        measured[name].attrs = {"long_name": text}
    labels = {n: c for n, c in decomposition.coords.items() if n not in measured.coords}
    return measured.assign_coords(labels)


def _reference(data: xr.Dataset, name: str, default: float) -> xr.DataArray:
    if name in data:
        return data[name]
    return xr.full_like(data["update"].isel(token=0, drop=True), default, dtype=float)


def _run(decomposition: xr.Dataset) -> int:
    """Tokens per chunk: whole runs of the decomposition, at most ``TOKENS_PER_CHUNK``."""
    n_tokens = decomposition.sizes["token"]
    run = decomposition["update"].variable.chunksizes.get("token", (n_tokens,))[0]
    return min(n_tokens, max(run, TOKENS_PER_CHUNK // run * run)) or 1


def _whole(data: xr.Dataset, dim: str) -> dict[str, int]:
    return {dim: -1} if dim in data.dims else {}
