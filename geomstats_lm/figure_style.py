"""How do all figures of the package look, and what do they take?

A result (it has ``tidy()``), a tidy frame or a Dataset becomes a frame; its models and ways of
patching become panels.  Colours are seaborn's colour-blind palette; markers, line styles and
hatches say the same in grey.  One column is 3.4 inches wide, two are 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

ONE_COLUMN, TWO_COLUMNS = 3.4, 7.0  # inches
HEIGHT = 2.6
MODES = {"single": "one position at a time", "all": "all positions at once"}
NULL: dict[str, Any] = {"color": "0.55", "lw": 1.0, "ls": (0, (1, 1)), "zorder": 1}
UNTITLED = ("measure", "null", "control", "replacement")  # where all rows share them
MARKERS = "osD^vPX*<>"
LINES = ("-", "--", "-.", ":")
LABELS = {
    "r2_centred": "share of the centred update explained",
    "explained": "share of the update explained",
    "relative_error": "relative error |r| / |D|",
    "cos_update_tokenwise": "cosine of update and\ntokenwise part",
    "cos_centred": "centred cosine of update\nand tokenwise part",
    "cos_update_residual": "cosine of update and residual",
    "angle_residual_tokenwise": "angle of residual and\ntokenwise part (degrees)",
    "residual_norm": "norm of the residual |r|",
    "residual_norm_standardized": "norm of the residual (standard deviations)",
    "kl": "KL of the output (nats)",
    "loss_change": "change of the loss (nats)",
    "damage_ratio": "KL of residual / KL of exchanged residual",
    "top1_changed": "share of tokens whose first guess changes",
    "k": "neighbours k",
    "ridge": "ridge",
    "rank": "rank",
    "n_reference": "reference tokens N",
}


def tidy_frame(
    data: Any, names: Sequence[str], *, keep_tokens: bool = False, argument: str = "frame"
) -> pd.DataFrame:
    """The rows of a result, a frame or a Dataset, with the columns that a figure needs.

    Parameters
    ----------
    data : Result, pandas.DataFrame or xarray.Dataset
        A Dataset's variables are averaged over tokens, draws and further dims without a meaning
        in a figure.
    names : sequence of str
        Columns or variables that must be there.
    keep_tokens : bool
        One row per token instead.
    argument : str
        Name of the argument, for the message.

    Returns
    -------
    pandas.DataFrame

    Raises
    ------
    TypeError, ValueError
        If it is none of the three, or a name is not in it.

    Examples
    --------
    >>> data = xr.Dataset({"kl": (("layer", "token"), [[1.0, 3.0]])}, {"layer": [1]})
    >>> tidy_frame(data, ["kl"]).to_dict("records")
    [{'layer': 1, 'kl': 2.0}]
    """
    if isinstance(data, xr.DataArray):
        data = data.to_dataset(name=data.name or "value")
    if isinstance(data, xr.Dataset):
        _check_names(names, list(data.variables), argument)
        wanted = data[list(names)]
        drop = ["draw"] if keep_tokens else ["draw", "token"]
        wanted = wanted.map(
            lambda v: (
                v.astype(float).mean([d for d in drop if d in v.dims])
                if any(d in v.dims for d in drop)
                else v
            )
        )
        labels = [c for c in wanted.coords if c not in wanted.dims and
                  not {"token", "layer", "model"} & set(wanted[c].dims)]  # fmt: skip
        keep = {"document", "is_massive"} if keep_tokens else set()
        other = [c for c in wanted.coords if c not in wanted.dims and c not in (*labels, *keep)]
        return wanted.drop_vars(other).compute().to_dataframe().reset_index()
    frame = data.tidy() if hasattr(data, "tidy") else data
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"{argument}: a result with tidy(), a DataFrame or a Dataset is accepted, "
            f"given {type(data).__name__}"
        )
    _check_names(names, list(frame.columns), argument)
    return frame.reset_index(drop=True)


def _check_names(names: Sequence[str], known: Sequence[Any], argument: str) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"{argument}: no {', '.join(missing)} in it; there are {list(known)}")


def new_axes(width: float = ONE_COLUMN, height: float = HEIGHT) -> Axes:
    """Axes of a new figure that no global state knows of."""
    figure = Figure(figsize=(width, height), layout="constrained")
    with sns.axes_style("ticks"):
        ax = figure.subplots()
    sns.despine(ax=ax)
    return ax


def over_panels(
    frame: pd.DataFrame,
    columns: Sequence[str],
    ax: Axes | None,
    draw: Callable[[Axes, pd.DataFrame], Any],
    *,
    height: float = HEIGHT,
) -> Axes | Figure:
    """Draw a panel for every combination of what tells rows apart, or the one on given axes.

    Parameters
    ----------
    frame : pandas.DataFrame
    columns : sequence of str
        Those of them that the frame has, with more than one level, make panels: the last one
        panels side by side, the others rows.
    ax : matplotlib.axes.Axes, optional
        For one panel only.
    draw : callable
        ``draw(ax, part of the frame)``.
    height : float
        Of a panel, in inches.

    Returns
    -------
    matplotlib.axes.Axes or matplotlib.figure.Figure
        A figure where there are several panels.

    Raises
    ------
    ValueError
        If axes are given and there are several panels, or no rows.
    """
    if not len(frame):
        raise ValueError("frame: no rows to draw")
    apart = [c for c in columns if c in frame and frame[c].nunique(dropna=False) > 1]
    if not apart:
        ax = ax if ax is not None else new_axes(height=height)
        draw(ax, frame)
        _title(ax, {c: frame[c].iloc[0] for c in columns if c in frame and c not in UNTITLED})
        return ax
    if ax is not None:
        levels = {c: list(dict.fromkeys(frame[c])) for c in apart}
        raise ValueError(f"ax: the data have several panels, {levels}; select one, or leave ax out")
    shared = {c: frame[c].iloc[0] for c in columns if c in frame and c not in [*apart, *UNTITLED]}
    *down, across = apart
    across_levels = list(dict.fromkeys(frame[across]))
    down_levels = list(dict.fromkeys(zip(*(frame[c] for c in down)))) if down else [()]
    if not down and len(across_levels) > 3:  # one column of panels would be as wide as a wall
        return _finished(_wrapped(frame, across, across_levels, draw, height), shared)
    width = ONE_COLUMN * len(across_levels)
    figure = Figure(figsize=(width, height * len(down_levels)), layout="constrained")
    with sns.axes_style("ticks"):
        grid = figure.subplots(len(down_levels), len(across_levels), squeeze=False, sharey="row")
    for i, values in enumerate(down_levels):
        part = frame
        for column, value in zip(down, values):
            part = part[part[column] == value]
        for j, level in enumerate(across_levels):
            _panel(grid[i, j], part[part[across] == level], draw,
                   {across: level, **dict(zip(down, values))})  # fmt: skip
            if j:
                grid[i, j].set_ylabel("")
                grid[i, j].tick_params(labelleft=False)
    return _finished(figure, shared)


def _finished(figure: Figure, shared: dict[str, Any]) -> Figure:
    """What all panels share: one legend, and a title of the levels that all of them have."""
    _one_legend(figure)
    if shared:
        figure.suptitle(", ".join(_level_names(shared)), fontsize=9)
    return figure


def _wrapped(
    frame: pd.DataFrame, column: str, levels: Sequence[Any], draw: Any, height: float
) -> Figure:
    wide = 2 if len(levels) == 4 else 3
    rows = -(-len(levels) // wide)
    figure = Figure(figsize=(TWO_COLUMNS, height * 0.85 * rows), layout="constrained")
    with sns.axes_style("ticks"):
        grid = figure.subplots(rows, wide, squeeze=False, sharey=True)
    for number, cell in enumerate(grid.ravel()):
        if number >= len(levels):
            cell.set_axis_off()
            continue
        _panel(cell, frame[frame[column] == levels[number]], draw, {column: levels[number]})
        if number % wide:
            cell.set_ylabel("")
    return figure


def _one_legend(figure: Figure) -> None:
    """What the panels name, once below all of them."""
    found: dict[str, Any] = {}
    title = None
    for ax in figure.axes:
        own = ax.get_legend()
        if own is not None:
            title = own.get_title().get_text() or title
            own.remove()
            found |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    if found:
        figure.legend(
            list(found.values()), list(found), title=title, title_fontsize=8, fontsize=8,
            loc="outside lower center", ncols=3, frameon=False, handlelength=2.4,
        )  # fmt: skip


def _panel(ax: Axes, part: pd.DataFrame, draw: Any, title: dict[str, Any]) -> None:
    sns.despine(ax=ax)
    if len(part):
        draw(ax, part)
    else:
        ax.set_axis_off()
    _title(ax, title)


def _level_names(levels: dict[str, Any]) -> list[str]:
    return [
        f"layer {value}" if column == "layer" else MODES.get(str(value), str(value))
        for column, value in levels.items()
    ]


def _title(ax: Axes, levels: dict[str, Any]) -> None:
    names = _level_names(levels)
    ax.set_title("\n".join([", ".join(names[:2]), *names[2:]]), fontsize=9)


def styles(levels: Any) -> dict[Any, dict[str, Any]]:
    """Colour, marker and line of every level, told apart in colour and in grey."""
    names = list(dict.fromkeys(levels))
    colours = sns.color_palette("colorblind", max(len(names), 1))
    return {
        name: {
            "color": colours[i], "marker": MARKERS[i % len(MARKERS)], "ms": 4, "lw": 1.3,
            "ls": LINES[i % len(LINES)],
        }
        for i, name in enumerate(names)
    }  # fmt: skip


def name_axes(ax: Axes, x: str, y: str) -> None:
    """Labels with units, sized for print."""
    ax.set_xlabel(x, fontsize=8.5)
    ax.set_ylabel(y, fontsize=8.5)
    ax.tick_params(labelsize=8)


def layer_ticks(ax: Axes, layers: Any) -> None:
    """Whole layers on the horizontal axis, not too many."""
    numbers = sorted({int(v) for v in layers})
    step = max(1, -(-len(numbers) // 8))
    ax.set_xticks(numbers[::step])


def legend(ax: Axes, title: str | None = None) -> None:
    """A legend below the axes, so that it hides no data; none where nothing is named."""
    found = {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    if not found:
        return
    columns = 1 if max(map(len, found)) > 24 else 2
    below = ax.transAxes + ScaledTranslation(0, -31 / 72, ax.figure.dpi_scale_trans)  # points
    ax.legend(
        list(found.values()), list(found), title=title, title_fontsize=8, fontsize=8,
        ncols=columns, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0),
        bbox_transform=below, borderaxespad=0, handlelength=2.4, columnspacing=1.2,
    )  # fmt: skip


def log_axis(axis: Axis, values: Any) -> None:
    """A logarithmic axis whose ticks are plain numbers, also over less than a decade."""
    low, high = float(np.min(values)), float(np.max(values))
    axis.set_minor_formatter(NullFormatter())
    if high / max(low, 1e-300) < 300:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def in_words(name: str) -> str:
    """The label of a variable on an axis, in full."""
    return LABELS.get(name, name.replace("_", " "))


def only(frame: pd.DataFrame, **levels: Any) -> pd.DataFrame:
    """The rows of one or several levels, each checked to be there; None takes all."""
    for column, wanted in levels.items():
        if wanted is None:
            continue
        if column not in frame:
            raise ValueError(f"{column}={wanted!r}: the data have no {column}")
        chosen = list(wanted) if isinstance(wanted, (list, tuple, np.ndarray)) else [wanted]
        unknown = [v for v in chosen if v not in set(frame[column])]
        if unknown:
            known = list(dict.fromkeys(frame[column]))
            raise ValueError(f"{column}={wanted!r}: accepted are {known}")
        frame = frame[frame[column].isin(chosen)]
    return frame
