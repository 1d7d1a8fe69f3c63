"""Which measurements of a token belong together: its geometry and its damage, side by side.

(model, function_class, layer, token)  joined exactly on every label
"""

from __future__ import annotations

import xarray as xr


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
