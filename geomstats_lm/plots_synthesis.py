"""Does it hold across models?  Every model's estimate, the synthesis, and what small models hide.

forest: estimate and interval a study, diamond the average, thin line the prediction interval
funnel: estimate against its standard error, within mu +- 1.96 se where nothing else varies
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from matplotlib.ticker import MaxNLocator

from geomstats_lm.figure_style import (
    MODES,
    NULL,
    TWO_COLUMNS,
    legend,
    name_axes,
    new_axes,
    over_panels,
    styles,
)

NORMAL = 1.959964
ROW = 0.21  # inches


def plot_forest(meta: Any, ax: Axes | None = None) -> Axes:
    """Estimates of all studies with their intervals, and the synthesis below them.

    Parameters
    ----------
    meta : MetaAnalysis
        From :func:`meta_analysis` without moderators.
    ax : matplotlib.axes.Axes, optional
        New ones, two columns wide, by default.

    Returns
    -------
    matplotlib.axes.Axes
        Squares are as large as a study's weight; the diamond is the average with its interval,
        the line below it the prediction interval of the next study.

    Examples
    --------
    >>> from geomstats_lm import meta_analysis
    >>> frame = pd.DataFrame({"model": list("abcd"), "estimate": [0.5, 0.6, 0.7, 0.65]})
    >>> frame["std_error"] = [0.05, 0.05, 0.04, 0.03]
    >>> plot_forest(meta_analysis(frame)).get_xlabel()
    'correlation'
    """
    _check(meta)
    by, over = list(meta.settings["by"]), meta.settings["over"]
    studies, pooled = _study_intervals(meta), meta.tidy()
    entries: list[tuple[str, str, Any]] = []
    for key, row in _by_group(pooled, by):
        if by:
            entries.append(("heading", ", ".join(MODES.get(str(v), str(v)) for v in key), None))
        part = studies
        for column, value in zip(by, key):
            part = part[part[column] == value]
        entries += [("study", str(one[over]), one) for one in part.to_dict("records")]
        entries.append(("pooled", "average", row.iloc[0].to_dict()))
    if ax is None:
        ax = new_axes(TWO_COLUMNS, 0.8 + ROW * len(entries))
    _draw_entries(ax, entries)
    correlations = meta.settings["transform"] == "fisher_z"
    ax.set_ylim(len(entries) - 0.4, -0.8)
    ax.set_yticks(range(len(entries)), [name for _, name, _ in entries])
    name_axes(ax, "correlation" if correlations else "estimate", "")
    for tick, (kind, _, _) in zip(ax.get_yticklabels(), entries):
        tick.set_fontweight("normal" if kind == "study" else "bold")
    ax.axvline(0, **NULL)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def _draw_entries(ax: Axes, entries: list[tuple[str, str, Any]]) -> None:
    colour = styles([0])[0]["color"]
    for y, (kind, _, one) in enumerate(entries):
        if one is None:
            continue
        low, high, estimate = one["conf_low"], one["conf_high"], one["estimate"]
        if not np.isfinite(estimate):
            ax.text(0, y, str(one.get("reason", "no estimate")), va="center", fontsize=7.5)
            continue
        if kind == "study":
            ax.plot([low, high], [y, y], color="0.35", lw=1)
            size = 2.5 + 5 * np.sqrt(one.get("share", 0.25))
            ax.plot(estimate, y, "s", ms=size, color=colour)
        else:
            ends = [one.get("pred_low", np.nan), one.get("pred_high", np.nan)]
            if np.isfinite(ends).all():
                ax.plot(ends, [y, y], color="0.35", lw=1, ls="-")
            corners = [(low, y), (estimate, y - 0.32), (high, y), (estimate, y + 0.32)]
            ax.add_patch(
                Polygon(corners, closed=True, facecolor="#d55e00", edgecolor="0.2", lw=0.6)
            )
            ax.update_datalim(corners)
        ax.text(
            1.01, y, f"{estimate:.2f} [{low:.2f}, {high:.2f}]", va="center", fontsize=7.5,
            transform=ax.get_yaxis_transform(),
        )  # fmt: skip


def _study_intervals(meta: Any) -> pd.DataFrame:
    """The studies with an interval each (their own where they brought one) and their weights."""
    studies = meta.studies.copy()
    back: Any = np.tanh if meta.settings["transform"] == "fisher_z" else np.asarray
    half = NORMAL * np.sqrt(studies["v"].to_numpy(float))
    y = studies["y"].to_numpy(float)
    for name, ends in (("conf_low", back(y - half)), ("conf_high", back(y + half))):
        own = studies[name].to_numpy(float) if name in studies else np.full(len(studies), np.nan)
        studies[name] = np.where(np.isfinite(own), own, ends)
    try:
        weight = meta.augment()["weight"].to_numpy(float) / 100
        studies["share"] = weight if len(weight) == len(studies) else 0.25
    except (ValueError, KeyError):
        studies["share"] = 0.25
    return studies


def plot_funnel(meta: Any, ax: Axes | None = None) -> Axes | Figure:
    """Estimates against their standard errors, about the synthesis.

    Parameters
    ----------
    meta : MetaAnalysis
        From :func:`meta_analysis` without moderators.
    ax : matplotlib.axes.Axes, optional
        New ones by default.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        Several groups make panels.  Within the dashed lines 95 % of studies would lie if they
        differed by chance alone; correlations are on the scale of Fisher's z, as synthesized.

    Examples
    --------
    >>> from geomstats_lm import meta_analysis
    >>> frame = pd.DataFrame({"model": list("abcd"), "estimate": [0.5, 0.6, 0.7, 0.65]})
    >>> frame["std_error"] = [0.05, 0.05, 0.04, 0.03]
    >>> plot_funnel(meta_analysis(frame)).get_ylabel()
    'standard error'
    """
    _check(meta)
    by, over = list(meta.settings["by"]), meta.settings["over"]
    pooled = meta.tidy()
    studies = meta.studies.copy()
    group = [", ".join(MODES.get(str(v), str(v)) for v in key) for key in zip(*(studies[c] for c in
             by))] if by else [""] * len(studies)  # fmt: skip
    studies = studies.assign(group=group)
    centres = {
        ", ".join(MODES.get(str(v), str(v)) for v in key): row["estimate_z"].iloc[0]
        for key, row in _by_group(pooled, by)
        if "estimate_z" in row
    }
    looks = styles(studies[over])

    def draw(ax: Axes, part: pd.DataFrame) -> None:
        centre = float(centres.get(part["group"].iloc[0], np.nan))
        error = np.sqrt(part["v"].to_numpy(float))
        deepest = 1.15 * float(error.max())
        if np.isfinite(centre):
            edge = NORMAL * deepest
            ax.plot([centre - edge, centre, centre + edge], [deepest, 0, deepest], lw=0.9, ls="--",
                    color="0.45")  # fmt: skip
            ax.axvline(centre, **NULL)
        for name, y, e in zip(part[over], part["y"], error):
            look = looks[name]
            ax.plot(y, e, ls="", marker=look["marker"], ms=5, color=look["color"], label=str(name))
        ax.set_ylim(deepest, 0)
        z = meta.settings["transform"] == "fisher_z"
        name_axes(ax, "correlation (Fisher's z)" if z else "estimate", "standard error")
        if len(looks) <= 8:
            legend(ax)

    return over_panels(studies, ["group"], ax, draw)


def _by_group(frame: pd.DataFrame, by: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    if not by:
        return [((), frame)]
    return [(key, part) for key, part in frame.groupby(by, sort=False, dropna=False)]


def _check(meta: Any) -> None:
    if not hasattr(meta, "studies"):
        raise TypeError(
            f"meta: a result of meta_analysis() is accepted, given {type(meta).__name__}"
        )
    if meta.settings.get("moderators"):
        raise ValueError("meta: with moderators there is no one average; fit without them first")
