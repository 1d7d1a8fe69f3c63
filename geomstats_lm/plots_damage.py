"""Does the size of what is missed go with the damage, and what does capacity buy?

KL against error over tokens,  KL against dose,  held-out error against k, rank, ridge or N
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from geomstats_lm.figure_style import (
    LABELS,
    in_words,
    legend,
    log_axis,
    name_axes,
    only,
    over_panels,
    styles,
    tidy_frame,
)

MANY = 2000  # points from which a density says more than dots
BINS = 10


def plot_error_damage(
    data: Any,
    x: str = "relative_error",
    y: str = "kl",
    *,
    layer: int | Sequence[int] | None = None,
    function_class: str | Sequence[str] | None = None,
    positions: str | None = None,
    control: str | None = None,
    correlation: Any = None,
    ax: Axes | None = None,
) -> Axes | Figure:
    """Damage of the output against the size of the residual, one point a token.

    Parameters
    ----------
    data : xarray.DataTree, xarray.Dataset or pandas.DataFrame
        A model's node with the leaves ``geometry`` and ``perturbation``, the two merged, or a
        frame with a row per token.
    x, y : str
        Variables per token.
    layer : int or sequence of int, optional
        All by default, together in one panel.
    function_class : str or sequence of str, optional
        All by default, one panel each.
    positions : {"single", "all"}, optional
        Both by default, one row of panels each.
    control : str, optional
        Draw the trend of that control's damage too, such as ``"exchanged"``.
    correlation : Result or pandas.DataFrame, optional
        From :func:`rank_correlation`: where it has one row for what a panel shows, its estimate
        and interval are written into it.
    ax : matplotlib.axes.Axes, optional
        New ones by default.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        Dots, or hexagons from 2000 tokens on; the line joins medians of tenths of the tokens.
        Axes are logarithmic where all values are positive; damages of exactly 0, below the floor
        of precision, are left out where they are less than a tenth.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> error = rng.uniform(0.1, 1, 100)
    >>> frame = pd.DataFrame({"relative_error": error, "kl": error**2 * rng.gamma(2, size=100)})
    >>> plot_error_damage(frame).get_yscale()
    'log'
    """
    names = [x, y]
    if isinstance(data, xr.DataTree):
        from geomstats_lm.merging import merge_leaves

        data = merge_leaves(data["geometry"].to_dataset(), data["perturbation"].to_dataset())
    if control is not None:
        data = _with_control(data, y, control)
        names.append(f"{y}_control")
    if isinstance(data, xr.Dataset):  # before it becomes a frame of all cells
        wanted = {"layer": layer, "function_class": function_class, "positions": positions}
        for dim, level in wanted.items():
            if level is not None and dim in data.dims:
                several = isinstance(level, (list, tuple, np.ndarray))
                only(pd.DataFrame({dim: data[dim].values}), **{dim: level})
                data = data.sel({dim: list(level) if several else [level]})  # type: ignore[arg-type]
    table = tidy_frame(data, names, keep_tokens=True, argument="data")
    table = only(table, layer=layer, function_class=function_class, positions=positions)
    table = table.loc[np.isfinite(table[[x, y]].to_numpy(float)).all(axis=1)]
    logs = [bool((table[n] > 0).all()) for n in (x, y)]
    if logs[1] is False and (table[y] > 0).mean() > 0.9:  # a few zeros are the floor of precision
        table, logs[1] = table[table[y] > 0], True

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        for log, scale in zip(logs, (ax.set_xscale, ax.set_yscale)):
            scale("log" if log else "linear")
        if len(part) > MANY:
            ax.hexbin(
                part[x], part[y], gridsize=32, bins="log", mincnt=1, cmap="cividis", lw=0,
                xscale="log" if logs[0] else "linear", yscale="log" if logs[1] else "linear",
            )  # fmt: skip
        else:
            ax.scatter(
                part[x], part[y], s=7, alpha=0.45, color=styles([0])[0]["color"], lw=0,
                rasterized=True,
            )  # fmt: skip
        for log, axis, name in zip(logs, (ax.xaxis, ax.yaxis), (x, y)):
            if log:  # hexbin has set ticks of its own
                log_axis(axis, part[name])
        looks = styles(["residual", "control"])
        looks["residual"] |= {"color": "#d55e00"}  # both stand out on dots and on a density
        looks["control"] |= {"color": "#cc79a7"}
        _trend(ax, part, x, y, "median, residual", looks["residual"])
        if control is not None:
            _trend(ax, part, x, f"{y}_control", f"median, {control}", looks["control"])
        name_axes(ax, in_words(x), in_words(y))
        text = _correlation_text(correlation, part, x, y)
        if text:
            ax.text(
                0.03, 0.98, text, transform=ax.transAxes, va="top", fontsize=8,
                bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1},
            )  # fmt: skip
        legend(ax)

    return over_panels(table, ("function_class", "positions", "model"), ax, draw, height=2.9)


def _with_control(data: Any, y: str, control: str) -> Any:
    if not isinstance(data, xr.Dataset):
        if f"{y}_control" not in data:
            raise ValueError(f"control={control!r}: data have no column {y}_control")
        return data
    known = data.control.values.tolist() if "control" in data.coords else []
    if control not in known or f"{y}_control" not in data:
        raise ValueError(f"control={control!r}: accepted are {known}")
    return data.sel(control=control, drop=True)


def _trend(ax: Axes, part: pd.DataFrame, x: str, y: str, label: str, look: dict[str, Any]) -> None:
    """Medians of both in up to ten equal parts of the tokens, by rank of x."""
    part = part[np.isfinite(part[y].astype(float))]
    bins = min(BINS, len(part) // 15)  # fewer would be points, not medians
    if bins < 2 or part[x].nunique() < 2 * bins:
        return
    part_of = pd.qcut(part[x].rank(method="first"), bins, labels=False)
    middle = part.groupby(part_of)[[x, y]].median()
    ax.plot(middle[x], middle[y], **look, label=label)


def _correlation_text(correlation: Any, part: pd.DataFrame, x: str, y: str) -> str:
    """Estimate and interval of the one row that belongs to a panel."""
    if correlation is None:
        return ""
    frame = correlation.tidy() if hasattr(correlation, "tidy") else correlation
    for column in ("model", "function_class", "positions", "layer"):
        if column in part and column in frame:
            here = set(part[column])
            kept = frame[column].isin(here) & (len(here) == 1)
            frame = frame[kept]
    if len(frame) != 1 or not np.isfinite(frame["estimate"].iloc[0]):
        return ""
    row = frame.iloc[0]
    name = str(row.get("method", "spearman")).capitalize()
    return f"{name} {row['estimate']:.2f} [{row['conf_low']:.2f}, {row['conf_high']:.2f}]"


def plot_dose_response(frame: Any, ax: Axes | None = None) -> Axes | Figure:
    """Damage against the share of the residual that was taken off, beside the control's.

    Parameters
    ----------
    frame : xarray.Dataset, Result or pandas.DataFrame
        From ``perturb(factors=...)``, or what :func:`damage_ratio` makes of it: ``factor``,
        ``damage`` and, where there was a control, ``damage_control``.
    ax : matplotlib.axes.Axes, optional
        New ones by default.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        A line a layer, dashed the control; means over tokens.

    Examples
    --------
    >>> frame = pd.DataFrame({"factor": [0.5, 1.0], "damage": [0.1, 0.4], "layer": 3})
    >>> plot_dose_response(frame).get_xlabel()
    'share of the residual taken off'
    """
    table = _doses(frame)
    layers = sorted(set(table["layer"])) if "layer" in table else [None]
    looks = styles(layers)
    panels = [c for c in ("function_class", "control", "positions", "model") if c in table]

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        for layer in layers:
            one = part if layer is None else part[part["layer"] == layer]
            one = one.sort_values("factor")
            look = looks[layer] | {"ls": "-"}
            name = "residual" if layer is None else f"layer {layer}"
            ax.plot(one["factor"], one["damage"], **look, label=name)
            if "damage_control" in one:
                ax.plot(
                    one["factor"], one["damage_control"], **(look | {"ls": "--", "mfc": "none"}),
                    label="dashed: control" if layer == layers[-1] else None,
                )  # fmt: skip
        values = part[[c for c in ("damage", "damage_control") if c in part]].to_numpy(float)
        if np.nanmin(values) > 0 and (part["factor"] > 0).all():
            ax.set_xscale("log")
            ax.set_yscale("log")
            doses = sorted(set(part["factor"]))
            ax.set_xticks(doses, [f"{v:g}" for v in doses])
            ax.minorticks_off()
        name_axes(ax, "share of the residual taken off", LABELS["kl"])
        legend(ax)

    return over_panels(table, panels, ax, draw, height=2.9)


def _doses(frame: Any) -> pd.DataFrame:
    if not isinstance(frame, xr.Dataset):
        return tidy_frame(frame, ["factor", "damage"])
    if "factor" not in frame.coords or "kl" not in frame:
        raise ValueError("frame: no doses in it; perturb(factors=[0.25, 0.5, 1.0]) makes them")
    if "kl_control" in frame:
        from geomstats_lm.damage import damage_ratio

        return damage_ratio(frame, measure="kl", n_boot=2).tidy()
    return tidy_frame(frame, ["kl", "factor"]).rename(columns={"kl": "damage"})


def plot_capacity(
    held_out: Any, x: str = "k", *, by: str | None = None, ax: Axes | None = None
) -> Axes | Figure:
    """Held-out error against a setting, other settings at their best.

    Parameters
    ----------
    held_out : CrossValidation, ReferenceCurve or pandas.DataFrame
        From :func:`cross_validate` or :func:`reference_curve`.
    x : str
        ``"k"``, ``"ridge"``, ``"rank"`` or ``"n_reference"``; any numeric column.
    by : str, optional
        Column whose levels are the lines; ``class_name``, else ``function_class``, by default.
    ax : matplotlib.axes.Axes, optional
        For one layer only; several layers make panels.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        Error bars are one standard error over documents.

    Examples
    --------
    >>> frame = pd.DataFrame({"k": [8, 32], "class_name": "affine", "layer": 1,
    ...                       "estimate": [0.8, 0.7], "std_error": 0.02})
    >>> plot_capacity(frame).get_xscale()
    'log'
    """
    table = tidy_frame(held_out, [x, "estimate", "std_error"], argument="held_out")
    if x == "k" and "n_reference" in table and table["k"].isna().all():
        raise ValueError("x='k': the classes have no k; accepted is 'n_reference'")
    by = by or ("class_name" if "class_name" in table else "function_class")
    if by not in table:
        table = table.assign(**{by: ""})
    table = table.dropna(subset=[x, "estimate"])
    panels = [c for c in ("layer", "model") if c in table and c != by]
    best = table.groupby([*panels, by, x], sort=False, dropna=False)["estimate"].idxmin()
    table = table.loc[best]
    looks = styles(table[by])
    values = np.sort(table[x].unique())
    wide = len(values) > 1 and values[0] > 0 and values[-1] / values[0] >= 4

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        for name, group in part.groupby(by, sort=False):
            group = group.sort_values(x)
            ax.errorbar(
                group[x], group["estimate"], yerr=group["std_error"], **looks[name],
                elinewidth=0.9, capsize=2, label=str(name) or None,
            )  # fmt: skip
        if wide:
            ax.set_xscale("log")
            ticks = values[:: max(1, -(-len(values) // 5))]
            ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
            ax.minorticks_off()
        name_axes(ax, in_words(x), "held-out relative error")
        legend(ax)

    return over_panels(table, panels[::-1] if len(panels) > 1 else panels, ax, draw)
