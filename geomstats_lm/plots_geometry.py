"""What does the geometry look like, layer by layer, beside what the method forces?

observed (lines, intervals)  beside  null (grey band):  90 degrees, m/d, sqrt(1 - e^2)
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
    NULL,
    in_words,
    layer_ticks,
    legend,
    name_axes,
    only,
    over_panels,
    styles,
    tidy_frame,
)
from geomstats_lm.nulls import angle_variance

PANELS = ("replacement", "control", "measure", "null", "positions", "model")
ENERGIES = ("pooled_energy_update", "pooled_energy_residual", "energy_forced")


def plot_layer_profile(
    frame: Any,
    value: str,
    *,
    by: str = "function_class",
    low: str | None = None,
    high: str | None = None,
    null: str | None = None,
    null_low: str | None = None,
    null_high: str | None = None,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes | Figure:
    """A value by layer, with interval bands and a grey null.

    Parameters
    ----------
    frame : Result, pandas.DataFrame or xarray.Dataset
        One row per layer and line (and model, way of patching, ...: these make panels).
    value : str
        Column to draw.
    by : str
        Column whose levels are the lines.
    low, high : str, optional
        Columns of the interval's ends; ``conf_low`` and ``conf_high`` of ``estimate``, else
        ``<value>_low`` and ``<value>_high``, where they are there.
    null, null_low, null_high : str, optional
        Columns of the null; ``null_mean``, ``null_low`` and ``null_high`` of ``observed``, where
        they are there.
    label : str, optional
        Of the vertical axis.
    ax : matplotlib.axes.Axes, optional
        New ones by default, with no global state.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        A Figure where there are several panels.

    Examples
    --------
    >>> frame = pd.DataFrame({"layer": [1, 2], "function_class": "affine", "estimate": [0.2, 0.5],
    ...                       "conf_low": [0.1, 0.4], "conf_high": [0.3, 0.6]})
    >>> plot_layer_profile(frame, "estimate", label="Spearman").get_ylabel()
    'Spearman'
    """
    bounds = (low, high, null, null_low, null_high)
    given = [c for c in bounds if c is not None]
    if isinstance(frame, xr.Dataset):
        table = tidy_frame(frame, [value, *given])
    else:
        table = tidy_frame(frame, [value, "layer", *given])
    if by not in table:
        table = table.assign(**{by: ""})
    low, high, null, null_low, null_high = _bounds(table, value, *bounds)
    panels = [c for c in PANELS if c != by]
    if by != "function_class":
        panels.insert(0, "function_class")
    repeated = table.duplicated([c for c in (*panels, by, "layer") if c in table])
    if repeated.any():
        example = table[repeated].iloc[0].to_dict()
        raise ValueError(
            f"frame: several rows of one layer and {by}, such as {example}; select, or average, "
            "first"
        )
    looks = styles(table[by])

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        grey = _null(ax, part, null, null_low, null_high)
        for name, group in part.groupby(by, sort=False):
            group = group.dropna(subset=[value]).sort_values("layer")
            if not len(group):
                continue
            ax.plot(group["layer"], group[value], **looks[name], label=str(name) or None)
            if low is not None and high is not None:
                ax.fill_between(
                    group["layer"], group[low], group[high], color=looks[name]["color"],
                    alpha=0.18, lw=0,
                )  # fmt: skip
        layer_ticks(ax, part["layer"])
        name_axes(ax, "layer", label or in_words(value))
        if grey is not None:
            grey.set_label("null")
        legend(ax)

    return over_panels(table, panels, ax, draw)


def _bounds(table: pd.DataFrame, value: str, *given: str | None) -> list[str | None]:
    own = ("conf_low", "conf_high") if value == "estimate" else (f"{value}_low", f"{value}_high")
    nulls = ("null_mean", "null_low", "null_high") if value == "observed" else ("", "", "")
    defaults = (*own, *nulls)
    return [g if g is not None else (d if d in table else None) for g, d in zip(given, defaults)]


def _null(ax: Axes, part: pd.DataFrame, mean: str | None, low: str | None, high: str | None) -> Any:
    """The null's band and line, one for each line of the figure that has another null."""
    drawn: Any = None
    columns = [c for c in (mean, low, high) if c is not None]
    if not columns:
        return None
    for _, group in part.groupby("function_class" if "function_class" in part else "layer"):
        one = group.groupby("layer")[columns].mean().sort_index()
        if low is not None and high is not None and one[low].notna().any():
            drawn = ax.fill_between(one.index, one[low], one[high], color="0.5", alpha=0.25, lw=0)
        if mean is not None and one[mean].notna().any():
            (drawn,) = ax.plot(one.index, one[mean], **NULL)
    return drawn


def plot_alignment_heatmap(
    frame: Any, value: str = "r2_centred", ax: Axes | None = None
) -> Axes | Figure:
    """A value by function class and layer, written into its cells.

    Parameters
    ----------
    frame : Result, pandas.DataFrame or xarray.Dataset
        With ``layer`` and ``function_class``; several models make panels.
    value : str
        Column to draw.
    ax : matplotlib.axes.Axes, optional
        New ones by default.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure

    Examples
    --------
    >>> frame = pd.DataFrame({"layer": [1, 2], "function_class": "affine"})
    >>> frame["r2_centred"] = [0.2, 0.5]
    >>> [text.get_text() for text in plot_alignment_heatmap(frame).texts]
    ['0.20', '0.50']
    """
    table = tidy_frame(frame, [value, *(() if isinstance(frame, xr.Dataset) else
                                        ("layer", "function_class"))])  # fmt: skip
    finite = table[value].to_numpy(float)
    finite = finite[np.isfinite(finite)]
    # one class that fails badly must not take the colours of all others
    low = max(float(finite.min()), -1.0) if finite.size else 0.0
    high = max(float(finite.max()), low + 1e-9) if finite.size else 1.0
    rows = table["function_class"].nunique()
    images: list[Any] = []

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        grid = part.pivot_table(index="function_class", columns="layer", values=value, sort=False)
        grid = grid[sorted(grid.columns)]
        colours: dict[str, Any] = {"cmap": "cividis", "vmin": low, "vmax": high}
        images.append(ax.imshow(grid.to_numpy(float), aspect="auto", **colours))
        size = 7.5 if grid.shape[1] <= 8 else 5.5
        for i, j in np.ndindex(grid.shape):
            number = float(grid.to_numpy(float)[i, j])
            if np.isfinite(number):
                dark = (number - low) / (high - low) < 0.55
                ax.text(j, i, f"{number:.2f}", ha="center", va="center", fontsize=size,
                        color="#fefefe" if dark else "#010101")  # fmt: skip
        ax.set_xticks(range(grid.shape[1]), [str(v) for v in grid.columns])
        ax.set_yticks(range(grid.shape[0]), [str(v) for v in grid.index])
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set_visible(False)
        name_axes(ax, "layer", "")

    drawn = over_panels(table, PANELS, ax, draw, height=1.35 + 0.3 * rows)
    axes = [image.axes for image in images]
    bar = axes[0].figure.colorbar(
        images[0], ax=axes, location="bottom", shrink=0.9 / len(axes) ** 0.5, aspect=30
    )
    bar.set_label(in_words(value), fontsize=8)
    bar.ax.tick_params(labelsize=7.5)
    bar.outline.set_visible(False)
    return drawn


def plot_angles(
    geometry: Any,
    *,
    layers: Sequence[int] | None = None,
    function_class: str | Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes | Figure:
    """Distribution over tokens of the angle of residual and tokenwise part, by layer.

    Parameters
    ----------
    geometry : xarray.Dataset or pandas.DataFrame
        With ``angle_residual_tokenwise`` per token; of a Dataset the number of dims comes along in
        its attributes, of a frame in a column ``dim``, and gives the band.
    layers : sequence of int, optional
        All by default.
    function_class : str or sequence of str, optional
        All by default, one row of panels each.
    ax : matplotlib.axes.Axes, optional
        New ones by default.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        Violins with their medians; the grey band holds 95 % of the angles that a random direction
        makes, about 90 degrees.

    Examples
    --------
    >>> angle = np.random.default_rng(0).normal(90, 5, size=(2, 50))
    >>> data = xr.Dataset({"angle_residual_tokenwise": (("layer", "token"), angle)},
    ...                   {"layer": [1, 2]}, {"dim": 64})
    >>> plot_angles(data).get_xlabel()
    'layer'
    """
    name = "angle_residual_tokenwise"
    table = tidy_frame(geometry, [name], keep_tokens=True, argument="geometry")
    table = only(table, layer=layers, function_class=function_class)
    dim = getattr(geometry, "attrs", {}).get("dim")
    if dim is None and "dim" in table:
        dim = table["dim"].iloc[0]
    table = table.dropna(subset=[name])
    looks = styles(table.get("function_class", [""]))

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        label = part["function_class"].iloc[0] if "function_class" in part else ""
        numbers = sorted({int(v) for v in part["layer"]})
        values = [part.loc[part["layer"] == v, name].to_numpy(float) for v in numbers]
        shown = [(v, a) for v, a in zip(numbers, values) if len(a) > 1 and np.ptp(a) > 0]
        if dim is not None:
            half = 1.96 * float(np.sqrt(angle_variance(int(dim))))
            ax.axhspan(90 - half, 90 + half, color="0.5", alpha=0.25, lw=0)
        ax.axhline(90, **NULL)
        if shown:
            bodies = ax.violinplot(
                [a for _, a in shown], [v for v, _ in shown], widths=0.8, showextrema=False
            )["bodies"]
            for body in bodies:  # type: ignore[attr-defined]
                body.set(facecolor=looks[label]["color"], alpha=0.55, edgecolor="none")
        ax.plot(numbers, [np.median(a) for a in values], "o", ms=3, color="black")
        layer_ticks(ax, numbers)
        name_axes(ax, "layer", in_words(name))

    return over_panels(table, ("function_class", "model"), ax, draw)


def plot_subspace_energy(frame_or_geometry: Any, ax: Axes | None = None) -> Axes | Figure:
    """Energy of update and residual in the dominant tokenwise subspace, beside m/d.

    Parameters
    ----------
    frame_or_geometry : xarray.Dataset, pandas.DataFrame or Result
        From ``geometry(node, subspace=m)``: ``pooled_energy_update``, ``pooled_energy_residual``
        and ``energy_forced`` = m/d by layer.
    ax : matplotlib.axes.Axes, optional
        New ones by default.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        Panels where there are several function classes or models.

    Raises
    ------
    ValueError
        If no subspace was measured.

    Examples
    --------
    >>> frame = pd.DataFrame({"layer": [1, 2], "pooled_energy_update": [0.9, 0.8],
    ...                       "pooled_energy_residual": [0.2, 0.3], "energy_forced": 0.1})
    >>> plot_subspace_energy(frame).get_xlabel()
    'layer'
    """
    known = getattr(frame_or_geometry, "columns", frame_or_geometry)
    if isinstance(frame_or_geometry, (xr.Dataset, pd.DataFrame)) and (
        "pooled_energy_residual" not in known
    ):
        raise ValueError(
            "frame_or_geometry: no energies in it; geometry(node, subspace=m) measures them"
        )
    table = tidy_frame(frame_or_geometry, list(ENERGIES), argument="frame_or_geometry")
    looks = styles(["update", "residual"])

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        part = part.sort_values("layer")
        for of in ("update", "residual"):
            ax.plot(part["layer"], part[f"pooled_energy_{of}"], **looks[of], label=of)
        ax.plot(part["layer"], part["energy_forced"], **NULL, label="m/d (random direction)")
        layer_ticks(ax, part["layer"])
        name_axes(ax, "layer", "share of energy in the\ndominant tokenwise subspace")
        ax.set_ylim(0, 1.03)
        legend(ax)

    table = table.dropna(subset=list(ENERGIES))
    return over_panels(table, ("function_class", "model"), ax, draw)
