"""Does the residual follow the mixer, the part of a block that sees other tokens?

With ``D = mixer + mlp``: norms, ``cos(D, mixer)``, ``cos(r, mixer)``, ``cos(r, mlp)``, and the
share ``<D, mixer>/|D|^2`` of the update, whose rest to 1 is the MLP's.
"""

from __future__ import annotations

import numpy as np
import xarray as xr

from geomstats_lm.geometry import decomposition_of, labelled_like, usable_tokens
from geomstats_lm.geometry_measures import cosine, norm
from geomstats_lm.parts import LONG_NAMES

PART_MEASURES = {
    "mixer_norm": "norm of the mixer's contribution",
    "mlp_norm": "norm of the MLP's contribution",
    "cos_mixer_mlp": "cosine of the two contributions",
    "cos_update_mixer": "cosine of update and mixer's contribution",
    "cos_update_mlp": "cosine of update and MLP's contribution",
    "cos_residual_mixer": "cosine of residual and mixer's contribution",
    "cos_residual_mlp": "cosine of residual and MLP's contribution",
    "share_mixer_update": "share of the update that lies along the mixer's contribution",
    "share_mixer_residual": "share of the residual's energy along the mixer's part",
    "share_mlp_residual": "share of the residual's energy along the MLP's part",
}


def parts_geometry(
    data: xr.DataTree | xr.Dataset, parts: xr.Dataset | None = None, *, exclude: bool = True
) -> xr.Dataset:
    """How update and residual are placed to the contributions of mixer and MLP.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or a decomposition.
    parts : xarray.Dataset, optional
        From :func:`extract_parts`; the leaf ``parts`` of the node by default.
    exclude : bool
        NaN at tokens that are left out of statistics.

    Returns
    -------
    xarray.Dataset
        Lazy.  Norms, cosines and shares per token, and per layer ``energy_mixer``, ``energy_mlp``:
        sum |part|^2 / sum |D|^2.  ``share_mixer_update`` = <D, mixer>/|D|^2, whose rest to 1 is
        the MLP's; the shares of the residual are squared cosines.

    Raises
    ------
    ValueError
        If there are no parts, or of other tokens.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node, load_example
    >>> from geomstats_lm.parts import extract_parts
    >>> model = load_example("gpt2")
    >>> node = example_node(model=model)
    >>> contributions = extract_parts(model, node, progress=False)
    >>> measured = parts_geometry(node["decomposition"].to_dataset(), contributions)
    >>> "energy_mixer" in measured
    True
    """
    if parts is None:
        if not isinstance(data, xr.DataTree) or "parts" not in data.children:
            raise ValueError("parts: give what extract_parts() returned, or a node that has them")
        parts = data["parts"].to_dataset()
    decomposition = decomposition_of(data)
    absent = set(decomposition.token.values) - set(parts.token.values)
    if absent:
        raise ValueError(f"parts: {len(absent)} tokens of the decomposition are not there")
    parts = parts[list(LONG_NAMES)].sel(token=decomposition.token, layer=decomposition.layer)
    single = decomposition["update"].chunks is None and parts.mixer.chunks is None
    lazy = decomposition.chunk({"dim": -1})
    run = {d: lazy.chunksizes[d] for d in ("model", "layer", "token", "dim")}
    parts = parts.chunk(run)
    usable = usable_tokens(lazy)
    stacked = xr.apply_ufunc(
        part_measures,
        lazy.tokenwise, lazy["update"], parts.mixer, parts.mlp,
        input_core_dims=[["dim"]] * 4,
        output_core_dims=[["measure"]],
        dask="parallelized",
        join="override",
        output_dtypes=[np.float32],
        dask_gufunc_kwargs={"output_sizes": {"measure": len(PART_MEASURES)}},
    )  # fmt: skip
    shown = stacked.where(usable) if exclude else stacked
    result = xr.Dataset({n: shown.isel(measure=i) for i, n in enumerate(PART_MEASURES)})
    of_update = {"update_norm", "mixer_norm", "mlp_norm"} | {
        n for n in PART_MEASURES if "residual" not in n
    }
    for name in of_update & set(result):  # these do not depend on the class
        result[name] = result[name].isel(function_class=0, drop=True)
    total = (lazy["update"].astype(float) ** 2).sum("dim").where(usable).sum("token")
    for name in LONG_NAMES:
        energy = (parts[name].astype(float) ** 2).sum("dim").where(usable).sum("token")
        result[f"energy_{name}"] = energy / total.where(total > 0)
    result["usable"] = usable
    result = labelled_like(decomposition, result, PART_MEASURES)
    return result.compute() if single else result


def part_measures(
    tokenwise: np.ndarray, update: np.ndarray, mixer: np.ndarray, mlp: np.ndarray
) -> np.ndarray:
    """``PART_MEASURES`` of vectors along the last axis, stacked on a new last axis.

    Parameters
    ----------
    tokenwise, update, mixer, mlp : numpy.ndarray, shape (..., dim)

    Returns
    -------
    numpy.ndarray of float32, shape (..., 10)
    """
    update = np.asarray(update, float)
    mixer, mlp = np.asarray(mixer, float), np.asarray(mlp, float)
    residual = update - np.asarray(tokenwise, float)
    size = norm(update) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(size > 0, (update * mixer).sum(axis=-1) / size, np.nan)
    to_mixer, to_mlp = cosine(residual, mixer), cosine(residual, mlp)
    measures = (
        norm(mixer), norm(mlp), cosine(mixer, mlp), cosine(update, mixer), cosine(update, mlp),
        to_mixer, to_mlp, share, to_mixer**2, to_mlp**2,
    )  # fmt: skip
    return np.stack(np.broadcast_arrays(*measures), axis=-1).astype(np.float32)
