"""How much of the update is tokenwise, and how sure is that?

    R2_l = 1 - sum |r_l|^2 / sum |D_l - mean D_l|^2,   interval by resampling whole documents

Sums are over usable evaluation tokens; a pooled row is the mean of its layers' shares, in the
estimate and in every resample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.resampling import bootstrap_interval, draw_counts
from geomstats_lm.statistics.results import Result


def tokenwise_share(
    geometry: xr.Dataset,
    *,
    groups: Mapping[str, Sequence[int]] | None = None,
    n_boot: int = 1999,
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """Share of the centred update that each function class explains, with intervals.

    Parameters
    ----------
    geometry : xarray.Dataset
        Of one model, from :func:`geomstats_lm.geometry`.
    groups : mapping of str to sequence of int, optional
        Layers to average over, by name; each layer by itself by default.
    n_boot : int
        Resamples of whole documents; 0 gives estimates alone.
    level : float
        Coverage of the percentile intervals.
    seed : int

    Returns
    -------
    Result
        ``tidy()``: one row per function class and layer (or ``layer_group``).

    Examples
    --------
    >>> dims = ("model", "function_class", "layer", "token")
    >>> data = xr.Dataset(
    ...     {"residual_norm": (dims, np.full((1, 1, 1, 40), 0.5)),
    ...      "update_centred_norm": (("model", "layer", "token"), np.ones((1, 1, 40)))},
    ...     {"model": ["tiny"], "function_class": ["affine"], "layer": [1],
    ...      "document": ("token", np.arange(40) // 4)},
    ... )
    >>> tokenwise_share(data, n_boot=99).tidy().estimate.item()
    0.75
    """
    one = geometry[["residual_norm", "update_centred_norm"]].isel(model=0).compute()
    labels, codes = np.unique(geometry["document"].values, return_inverse=True)
    model = str(geometry.model.values[0])
    layers = [int(v) for v in one.layer.values]
    pooled = {v: [v] for v in layers} if groups is None else groups
    counts = draw_counts(len(labels), max(n_boot, 1), seed=seed, label=model).astype(float)
    update = one.update_centred_norm.transpose("layer", "token").values.astype(float)
    rows = []
    for label in one.function_class.values:
        residual = one.residual_norm.sel(function_class=label).transpose("layer", "token").values
        there = np.isfinite(residual) & np.isfinite(update)
        left, whole = (
            _by_document(np.where(there, v.astype(float) ** 2, 0.0), codes, len(labels))
            for v in (residual, update)
        )
        for name, members in pooled.items():
            inside = np.isin(layers, list(members))
            n_clusters = len(np.unique(codes[there[inside].any(axis=0)]))
            estimate = float(_share(left[inside].sum(1), whole[inside].sum(1)).mean())
            low = high = error = np.nan
            reason = "" if n_clusters > 1 else "one document has no interval"
            if n_clusters > 1 and n_boot:
                drawn = _share(left[inside] @ counts, whole[inside] @ counts).mean(axis=0)
                low, high, _, reason = bootstrap_interval(estimate, drawn, level=level)
                error = float(np.nanstd(drawn, ddof=1))
            rows.append(
                {
                    "model": model, "function_class": str(label),
                    "layer" if groups is None else "layer_group": name,
                    "estimate": estimate, "std_error": error, "conf_low": low, "conf_high": high,
                    "n": int(there[inside].sum()), "n_clusters": n_clusters, "reason": reason,
                }
            )  # fmt: skip
    settings: dict[str, Any] = {"n_boot": n_boot, "level": level, "seed": seed}
    frame = pd.DataFrame(rows)
    note = "1 is all of it, 0 no more than a constant update; below 0 the map does worse than that."
    fits = pd.DataFrame([{"n_clusters": len(labels), "n_rows": len(frame)}])
    return Result("Share of the centred update explained", frame, fits, settings, notes=[note])


def _by_document(values: np.ndarray, codes: np.ndarray, n: int) -> np.ndarray:
    """Sums within documents of values (layer, token): (layer, document)."""
    sums = np.zeros((len(values), n))
    np.add.at(sums.T, codes, values.T)
    return sums


def _share(left: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return 1 - np.divide(left, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
