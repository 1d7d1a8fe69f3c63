"""How does every result of the package answer: one row per estimate, per fit, per observation?

    result.tidy()   result.glance()   result.augment()   result.summary()   result.to_markdown() ...

The frames are raw and unrounded, with the column names of R's broom; rounding happens in what is
shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

INTERVAL_COLUMNS = ("conf_low", "conf_high")


@dataclass
class Result:
    """Estimates with their uncertainty, as a tidy frame and what is needed to read it.

    Attributes
    ----------
    title
        What was estimated, in a phrase.
    estimates
        One row per estimate.
    fits
        One row per fit, or per call.
    settings
        What the caller chose.
    observations
        Gives one row per observation when called (data may be lazy and large).
    notes
        Sentences a reader of the table needs.
    replicates
        Every row's value in every bootstrap resample, where there was a bootstrap.
    """

    title: str
    estimates: pd.DataFrame
    fits: pd.DataFrame
    settings: dict[str, Any] = field(default_factory=dict)
    observations: Callable[[], pd.DataFrame] | None = None
    notes: list[str] = field(default_factory=list)
    replicates: xr.DataArray = field(default_factory=lambda: xr.DataArray(np.empty((0, 0))))

    def tidy(self, conf_int: bool = True) -> pd.DataFrame:
        """One row per estimate; `conf_int=False` leaves out the interval."""
        frame = self.estimates.copy()
        drop = [name for name in INTERVAL_COLUMNS if name in frame and not conf_int]
        return frame.drop(columns=drop)

    def glance(self) -> pd.DataFrame:
        """One row per fit."""
        return self.fits.copy()

    def augment(self) -> pd.DataFrame:
        """One row per observation that entered.

        Raises
        ------
        ValueError
            The result has no observations of its own (it was made from other estimates).
        """
        if self.observations is None:
            raise ValueError(
                f"{self.title}: made from estimates, so there are no observations to augment"
            )
        return self.observations()

    def summary(self, rows: int = 40) -> str:
        """A page for people: what was asked, the rounded table, and what to know about it."""
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        frame = rounded(self.estimates.head(rows))
        lines = [self.title, f"  {chosen}" if chosen else "", frame.to_string(index=False)]
        if len(self.estimates) > rows:
            lines.append(f"... and {len(self.estimates) - rows} more rows: tidy()")
        return "\n".join(
            [line for line in lines if line] + [f"Note: {note}" for note in self.notes]
        )

    def to_markdown(self) -> str:
        """The rounded table as a pipe table, with the notes below."""
        return "\n".join([markdown_table(rounded(self.estimates)), "", *self.notes]).strip()

    def to_latex(self) -> str:
        """The rounded table as a LaTeX tabular with booktabs rules, caption included."""
        return latex_table(rounded(self.estimates), self.title)

    def to_html(self) -> str:
        """The rounded table as HTML that stands alone (great_tables)."""
        import great_tables

        table = great_tables.GT(rounded(self.estimates), id="geomstats-lm").tab_header(
            title=self.title
        )
        for note in self.notes:
            table = table.tab_source_note(note)
        return table.as_raw_html()

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return self.summary(rows=10)


def rounded(frame: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """Every cell as a reader wants it: p-values as "<.001", numbers to 3 digits, NaN as a dash."""
    shown = {}
    for name in frame.columns:
        column = frame[name]
        if str(name).startswith("p_"):
            shown[name] = [_p_value(value) for value in column]
        elif pd.api.types.is_bool_dtype(column):
            shown[name] = ["yes" if value else "no" for value in column]
        elif pd.api.types.is_float_dtype(column):
            shown[name] = [_number(value, digits) for value in column]
        else:
            shown[name] = ["" if value is None else str(value) for value in column]
    return pd.DataFrame(shown, columns=frame.columns)


def _p_value(value: float) -> str:
    if pd.isna(value):
        return "–"
    return "<.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float, digits: int) -> str:
    if pd.isna(value):
        return "–"
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}f}"
    return f"{value:.{digits - 1}e}"


def markdown_table(frame: pd.DataFrame) -> str:
    """A frame of strings as a pipe table."""
    rows = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    rows = [[str(value).replace("|", "\\|") for value in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def latex_table(frame: pd.DataFrame, caption: str, *, long: bool = False) -> str:
    """A frame of strings as LaTeX with booktabs rules; a `long` one goes over pages (longtable)."""
    style = frame.rename(columns=_latex_escape).map(_latex_escape).style.hide(axis="index")
    how: dict[str, Any] = {"environment": "longtable"} if long else {"position_float": "centering"}
    return style.to_latex(hrules=True, caption=_latex_escape(caption), **how)


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "∞": r"$\infty$",
    "−": "$-$",
    "<": "$<$",
    ">": "$>$",
}


def _latex_escape(text: Any) -> str:
    return "".join(_LATEX.get(character, character) for character in str(text))
