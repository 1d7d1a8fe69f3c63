"""What do the answers look like?  One figure per question, observed beside forced.

Every function takes a result, a tidy frame or a Dataset and returns the Axes, or a Figure of
several panels; nothing touches matplotlib's global state.  The rooms behind are
``plots_geometry``, ``plots_damage``, ``plots_synthesis`` and ``token_strips``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geomstats_lm.figure_style import layer_ticks, legend, name_axes, over_panels, styles
from geomstats_lm.geometry import beside_forced
from geomstats_lm.plots_damage import plot_capacity, plot_dose_response, plot_error_damage
from geomstats_lm.plots_geometry import (
    plot_alignment_heatmap,
    plot_angles,
    plot_layer_profile,
    plot_subspace_energy,
)
from geomstats_lm.plots_synthesis import plot_forest, plot_funnel
from geomstats_lm.token_strips import token_strip

__all__ = [
    "damage_profile",
    "layer_profile",
    "plot_alignment",
    "plot_alignment_heatmap",
    "plot_angles",
    "plot_capacity",
    "plot_correlations",
    "plot_dose_response",
    "plot_error_damage",
    "plot_forest",
    "plot_funnel",
    "plot_layer_profile",
    "plot_profiles",
    "plot_subspace_energy",
    "study_figures",
    "token_strip",
]


def study_figures(
    geometries: Sequence[xr.Dataset],
    perturbations: Sequence[xr.Dataset],
    correlations: pd.DataFrame,
) -> dict[str, Figure]:
    """The figures of a study, one per question.

    Parameters
    ----------
    geometries, perturbations : sequence of xarray.Dataset
        One leaf per model.
    correlations : pandas.DataFrame
        Tidy correlations by model, function class, positions and layer.

    Returns
    -------
    dict of str to matplotlib.figure.Figure
        ``how_much_is_tokenwise``, ``alignment_beside_forced``, ``residual_and_damage``,
        ``damage_beside_control``.
    """
    profile = pd.concat([layer_profile(g) for g in geometries], ignore_index=True)
    ratio = pd.concat([damage_profile(p) for p in perturbations], ignore_index=True)
    return {
        "how_much_is_tokenwise": plot_profiles(
            profile, "r2_centred", label="share of centred update explained", baseline=0.0
        ),
        "alignment_beside_forced": plot_alignment(profile),
        "residual_and_damage": plot_correlations(correlations),
        "damage_beside_control": plot_profiles(
            ratio, "damage_ratio", label="KL of residual / KL of exchanged residual",
            baseline=1.0, rows="positions",
        ),
    }  # fmt: skip


def layer_profile(geometry: xr.Dataset) -> pd.DataFrame:
    """Means over tokens, by layer and function class, of what a geometry holds."""
    names = [
        "relative_error", "r2_centred", "cos_update_tokenwise", "forced_cos_update_tokenwise",
        "cos_centred", "forced_cos_centred",
    ]  # fmt: skip
    means = beside_forced(geometry[names]).map(
        lambda v: v.mean("token") if "token" in v.dims else v
    )
    means = means.drop_vars([c for c in means.coords if c not in means.dims])
    return means.compute().to_dataframe().reset_index()


def damage_profile(perturbation: xr.Dataset) -> pd.DataFrame:
    """Damage ratio of the first control, by layer, function class and way of patching."""
    ratio = perturbation["damage_ratio"].isel(control=0, drop=True)
    ratio = ratio.drop_vars([c for c in ratio.coords if c not in ratio.dims])
    return ratio.compute().to_dataframe().reset_index()


def plot_profiles(
    frame: pd.DataFrame,
    value: str,
    *,
    label: str,
    baseline: float | None = None,
    rows: str | None = None,
) -> Figure:
    """A value by layer, one panel a model, one line a function class.

    Parameters
    ----------
    frame : pandas.DataFrame
        Columns ``model``, ``layer``, ``function_class``, ``value``.
    value : str
        Column to draw.
    label : str
        What it is, for the axis.
    baseline : float, optional
        A grey line: the value with nothing there.
    rows : str, optional
        Column that makes rows of panels.

    Returns
    -------
    matplotlib.figure.Figure
        Where a class fails badly at a layer, the axis ends at 0.3 below the 5 % quantile.
    """
    columns = [c for c in (rows, "model") if c is not None]
    kept = frame[[*columns, "layer", "function_class", value]]
    figure = _figure(plot_layer_profile(kept, value, label=label))
    low = np.nanpercentile(kept[value], 5) if kept[value].notna().any() else 0.0
    for ax in figure.axes:
        if baseline is not None:
            ax.axhline(baseline, color="0.6", lw=1, zorder=0)
        ax.set_ylim(bottom=max(ax.get_ylim()[0], min(low, baseline or 0.0) - 0.3))
    return figure


def plot_alignment(frame: pd.DataFrame) -> Figure:
    """Raw and centred cosine of update and tokenwise part (points) beside the forced (lines).

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`layer_profile`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    kinds = {
        "raw": ("cos_update_tokenwise", "forced_cos_update_tokenwise"),
        "centred": ("cos_centred", "forced_cos_centred"),
    }
    long = pd.concat([frame.assign(kind=kind) for kind in kinds], ignore_index=True)
    looks = styles(frame["function_class"])

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        kind = str(part["kind"].iloc[0])
        observed, forced = kinds[kind]
        for name, group in part.groupby("function_class", sort=False):
            if group[observed].notna().any():
                look = looks[name]
                ax.plot(
                    group["layer"], group[observed], ls="", marker=look["marker"], ms=5,
                    color=look["color"], label=str(name),
                )  # fmt: skip
                ax.plot(group["layer"], group[forced], lw=0.9, ls="--", color=look["color"])
        layer_ticks(ax, part["layer"])
        name_axes(ax, "layer", "cos(update, tokenwise)")
        ax.set_ylim(top=1.03)
        legend(ax, "dashed: forced by the residual's size")

    return _figure(over_panels(long, ["kind", "model"], None, draw))


def plot_correlations(frame: pd.DataFrame) -> Figure:
    """Correlation of residual size and output damage by layer, with its interval.

    Parameters
    ----------
    frame : pandas.DataFrame
        Tidy: ``model``, ``function_class``, ``positions``, ``layer``, ``estimate``,
        ``conf_low``, ``conf_high``, ``method``.

    Returns
    -------
    matplotlib.figure.Figure
    """
    looks = styles(frame["function_class"])
    names = list(looks)

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        for name, group in part.groupby("function_class", sort=False):
            if group["estimate"].notna().any():
                look = looks[name]
                shift = 0.6 * (names.index(name) / max(len(names) - 1, 1) - 0.5)
                error = [
                    (group["estimate"] - group["conf_low"]).clip(lower=0),
                    (group["conf_high"] - group["estimate"]).clip(lower=0),
                ]
                ax.errorbar(
                    group["layer"] + shift, group["estimate"], yerr=error, ls="", lw=1, ms=4,
                    marker=look["marker"], color=look["color"], label=str(name),
                )  # fmt: skip
        ax.axhline(0, color="0.6", lw=1, zorder=0)
        layer_ticks(ax, part["layer"])
        name_axes(ax, "layer", f"{part['method'].iloc[0].capitalize()} of |r| and KL")
        ax.set_ylim(-1.05, 1.05)
        legend(ax)

    return _figure(over_panels(frame, ["positions", "model"], None, draw))


def _figure(drawn: Any) -> Figure:
    return drawn if isinstance(drawn, Figure) else drawn.figure
