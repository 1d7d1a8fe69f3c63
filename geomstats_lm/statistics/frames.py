"""Which rows does a regression see?

    rows = { observations with a finite value in every variable of the formula, not left out }

Regressions take frames or labelled Datasets; this is where the one becomes the other, under the
same rule for flagged tokens as the correlations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.statistics.cells import LEAVE_OUT
from geomstats_lm.statistics.formula import check_known, design, variable_names


@dataclass(frozen=True)
class ModelFrame:
    """Response (n,), design (n, p) with names, and the rows of data they come from."""

    y: np.ndarray
    x: pd.DataFrame
    data: pd.DataFrame
    n_missing: int
    n_left_out: int

    @property
    def terms(self) -> list[str]:
        """Names of the design's columns."""
        return [str(name) for name in self.x.columns]


def model_frame(
    formula: str,
    data: pd.DataFrame | xr.Dataset,
    *,
    extra: Sequence[str] = (),
    leave_out: Sequence[str] = LEAVE_OUT,
) -> ModelFrame:
    """Evaluate both sides of "response ~ terms" on the complete, unflagged rows of the data.

    Raises
    ------
    TypeError, ValueError
        Not a frame or Dataset; no such form; an unknown variable (the nearest ones are named); a
        factor as response; too few rows for the design.
    """
    if formula.count("~") != 1 or not all(part.strip() for part in formula.split("~")):
        raise ValueError(f"formula={formula!r} is not of the form 'response ~ terms'")
    left, right = (part.strip() for part in formula.split("~"))
    names = list(dict.fromkeys([*variable_names(left), *variable_names(right), *extra]))
    frame = as_frame(data, names, leave_out)
    flagged = np.zeros(len(frame), bool)
    for flag in leave_out:
        if flag == "first_position":
            if {"position", "sequence"} <= set(frame):
                flagged |= frame["position"].to_numpy() == 0
        elif flag in frame:
            flagged |= frame[flag].to_numpy(dtype=bool)
    complete = frame[names].notna().all(axis=1).to_numpy()
    kept = frame[complete & ~flagged].reset_index(drop=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = design(f"0 + {left}", kept)
        x = design(right, kept)
    if y.shape[1] != 1:
        raise ValueError(f"formula={formula!r}: the response is a factor, not one number")
    finite = np.isfinite(y.to_numpy(float)).all(axis=1) & np.isfinite(x.to_numpy(float)).all(axis=1)
    n_finite, width = int(finite.sum()), x.shape[1]
    if n_finite <= width:
        raise ValueError(f"formula={formula!r}: {n_finite} complete rows for {width} coefficients")
    x = x[finite].astype(float).reset_index(drop=True)
    if np.linalg.matrix_rank(x.to_numpy()) < width:
        raise ValueError(f"formula={formula!r}: the columns {list(x)} are not independent")
    return ModelFrame(
        y=y.to_numpy(float)[finite, 0],
        x=x,
        data=kept[finite].reset_index(drop=True),
        n_missing=int((~complete).sum() + (~finite).sum()),
        n_left_out=int((complete & flagged).sum()),
    )


def as_frame(
    data: pd.DataFrame | xr.Dataset, names: Sequence[str], leave_out: Sequence[str] = ()
) -> pd.DataFrame:
    """The variables named, and the flags there are, one row per observation."""
    if isinstance(data, pd.DataFrame):
        check_known(names, data.columns)
        return data.reset_index(drop=True)
    if not isinstance(data, xr.Dataset):
        raise TypeError(f"data: expected a DataFrame or a Dataset, got {type(data).__name__}")
    check_known(names, [*data.variables, *data.dims])
    flags = [*leave_out, "position", "sequence"] if leave_out else []
    wanted = [name for name in dict.fromkeys([*names, *flags]) if name in data.variables]
    return data[wanted].reset_coords().to_dataframe().reset_index()
