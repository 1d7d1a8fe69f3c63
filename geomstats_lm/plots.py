"""What do the answers look like?  One figure per question, observed beside forced.

Colours are seaborn's colour-blind palette; line styles and markers tell classes apart in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geomstats_lm.geometry import beside_forced

ONE_COLUMN, PANEL = (3.4, 2.6), (3.6, 3.0)
MODES = {"single": "one position at a time", "all": "all positions at once"}


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
    """
    figure, axes = _panels(frame, rows)
    styles = _styles(frame["function_class"])
    for (row, model), ax in axes.items():
        part = frame[frame["model"] == model]
        part = part[part[rows] == row] if rows else part
        for name, group in part.groupby("function_class", sort=False):
            if group[value].notna().any():
                ax.plot(group["layer"], group[value], **styles[name], label=name)
        if baseline is not None:
            ax.axhline(baseline, color="0.6", lw=1, zorder=0)
        low = np.nanpercentile(part[value], 5) if part[value].notna().any() else 0.0
        ax.set_ylim(bottom=max(ax.get_ylim()[0], min(low, baseline or 0.0) - 0.3))
        _name_axes(ax, model, part["layer"], label)
        if rows:
            ax.set_title(f"{model}: {MODES.get(str(row), row)}", fontsize=9)
    _legend(figure, axes)
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
    figure, axes = _panels(long, "kind")
    styles = _styles(frame["function_class"])
    for (kind, model), ax in axes.items():
        observed, forced = kinds[str(kind)]
        part = frame[frame["model"] == model]
        for name, group in part.groupby("function_class", sort=False):
            if group[observed].notna().any():
                style = styles[name]
                ax.plot(
                    group["layer"], group[observed], ls="", marker=style["marker"], ms=5,
                    color=style["color"], label=name,
                )  # fmt: skip
                ax.plot(group["layer"], group[forced], lw=0.9, ls="--", color=style["color"])
        _name_axes(ax, model, part["layer"], f"cos(update, tokenwise), {kind}")
        ax.set_ylim(top=1.03)
    _legend(figure, axes, extra="dashed: forced by the residual's size")
    return figure


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
    figure, axes = _panels(frame, "positions")
    styles = _styles(frame["function_class"])
    names = list(styles)
    for (mode, model), ax in axes.items():
        part = frame[(frame["model"] == model) & (frame["positions"] == mode)]
        for name, group in part.groupby("function_class", sort=False):
            if group["estimate"].notna().any():
                style = styles[name]
                shift = 0.6 * (names.index(name) / max(len(names) - 1, 1) - 0.5)
                error = [
                    (group["estimate"] - group["conf_low"]).clip(lower=0),
                    (group["conf_high"] - group["estimate"]).clip(lower=0),
                ]
                ax.errorbar(
                    group["layer"] + shift, group["estimate"], yerr=error, ls="", lw=1, ms=4,
                    marker=style["marker"], color=style["color"], label=name,
                )  # fmt: skip
        ax.axhline(0, color="0.6", lw=1, zorder=0)
        _name_axes(ax, model, part["layer"], f"{frame['method'].iloc[0]} of |residual| and KL")
        ax.set_title(f"{model}: {MODES.get(str(mode), mode)}", fontsize=9)
        ax.set_ylim(-1.05, 1.05)
    _legend(figure, axes)
    return figure


def _panels(frame: pd.DataFrame, rows: str | None) -> tuple[Figure, dict[tuple[Any, str], Axes]]:
    models = list(dict.fromkeys(frame["model"]))
    levels = list(dict.fromkeys(frame[rows])) if rows else [None]
    figure = Figure(figsize=(PANEL[0] * len(models), PANEL[1] * len(levels)), layout="constrained")
    with sns.axes_style("ticks"):
        grid = figure.subplots(len(levels), len(models), squeeze=False)
    axes = {(level, m): grid[i, j] for i, level in enumerate(levels) for j, m in enumerate(models)}
    for ax in axes.values():
        sns.despine(ax=ax)
    return figure, axes


def _styles(classes: pd.Series) -> dict[Any, dict[str, Any]]:
    names = list(dict.fromkeys(classes))
    colours = sns.color_palette("colorblind", max(len(names), 1))
    markers = "osD^vPX*<>"
    lines = ("-", "--", "-.", ":")
    return {
        name: {
            "color": colours[i], "marker": markers[i % len(markers)], "ms": 4, "lw": 1.3,
            "ls": lines[i % len(lines)],
        }
        for i, name in enumerate(names)
    }  # fmt: skip


def _name_axes(ax: Axes, model: str, layers: pd.Series, label: str) -> None:
    ax.set_title(model, fontsize=9)
    ax.set_xlabel("layer", fontsize=9)
    ax.set_ylabel(label, fontsize=9)
    ax.tick_params(labelsize=8)
    numbers = sorted(set(layers))
    ax.set_xticks(numbers[:: max(1, len(numbers) // 8)])


def _legend(figure: Figure, axes: Mapping[Any, Axes], extra: str | None = None) -> None:
    found: dict[str, Any] = {}
    for ax in axes.values():
        found.update({text: line for line, text in zip(*ax.get_legend_handles_labels())})
    figure.legend(
        list(found.values()), list(found), title=extra, title_fontsize=8, fontsize=8,
        loc="outside lower center", ncols=4, frameon=False,
    )  # fmt: skip
