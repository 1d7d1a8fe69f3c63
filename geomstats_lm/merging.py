"""Which measurements of a token belong together: its geometry and its damage, side by side.

(model, function_class, layer, token)  joined exactly on every label
"""

from __future__ import annotations

from typing import Any

import xarray as xr

from geomstats_lm.statistics import RankCorrelation, rank_correlation


def correlate(
    geometry: xr.Dataset,
    perturbation: xr.Dataset,
    formula: str = "kl ~ residual_norm",
    **options: Any,
) -> RankCorrelation:
    """Correlate size of residual and output damage over tokens, layer by layer.

    Parameters
    ----------
    geometry, perturbation : xarray.Dataset
        Leaves of one model.
    formula : str
        Any variables of the two.
    **options
        Passed to :func:`geomstats_lm.rank_correlation`.

    Returns
    -------
    RankCorrelation
        One row per model, function class, positions and layer.

    Examples
    --------
    >>> labels = {"function_class": ["affine"], "layer": [1], "document": ("token", [1, 2, 3])}
    >>> dims = ("function_class", "layer", "token")
    >>> size = xr.Dataset({"residual_norm": (dims, [[[0.1, 0.2, 0.3]]])}, labels)
    >>> damage = xr.Dataset({"kl": (dims, [[[1.0, 3.0, 2.0]]])}, labels)
    >>> round(correlate(size, damage, n_boot=0).tidy().estimate.item(), 6)
    0.5
    """
    return rank_correlation(merge_leaves(geometry, perturbation), formula, **options)


def merge_leaves(geometry: xr.Dataset, perturbation: xr.Dataset) -> xr.Dataset:
    """Geometry and perturbation of one model as one Dataset, over the labels that both have.

    Parameters
    ----------
    geometry, perturbation : xarray.Dataset
        Leaves of one model.

    Returns
    -------
    xarray.Dataset

    Examples
    --------
    >>> labels = {"function_class": ["affine"], "layer": [1]}
    >>> size = xr.Dataset({"residual_norm": (("function_class", "layer"), [[0.1]])}, labels)
    >>> damage = xr.Dataset({"kl": (("function_class", "layer"), [[0.2]])}, labels)
    >>> sorted(merge_leaves(size, damage))
    ['kl', 'residual_norm']
    """
    shared = [c for c in perturbation.function_class.values if c in geometry.function_class.values]
    layers = [v for v in perturbation.layer.values if v in geometry.layer.values]
    return xr.merge(
        [
            geometry.sel(function_class=shared, layer=layers),
            perturbation.drop_vars("damage_ratio", errors="ignore").sel(
                function_class=shared, layer=layers
            ),
        ],
        join="exact",
        compat="override",
        combine_attrs="drop_conflicts",
    )
