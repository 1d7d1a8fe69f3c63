"""Which findings remain when many were looked for?

    Benjamini-Hochberg:  q_(i) = min over j >= i of  m p_(j) / j,   m = number of p-values that
    exist

A missing p-value is not a test: it is held out of m and stays missing, so that one degenerate
cell does not blank a whole table.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from statsmodels.stats.multitest import multipletests

METHODS = (
    "bonferroni",
    "sidak",
    "holm-sidak",
    "holm",
    "simes-hochberg",
    "hommel",
    "fdr_bh",
    "fdr_by",
    "fdr_tsbh",
    "fdr_tsbky",
)


def adjust_p_values(p_values: np.ndarray, method: str | None = "fdr_bh") -> np.ndarray:
    """Adjusted p-values of any shape, NaN held out.

    Parameters
    ----------
    p_values
        In [0, 1] or NaN.
    method
        A name of `statsmodels.stats.multitest.multipletests`, or None for no adjustment.

    Raises
    ------
    ValueError
        Unknown method, or a value outside [0, 1].

    Examples
    --------
    >>> adjust_p_values(np.array([0.01, np.nan, 0.04]))
    array([0.02,  nan, 0.04])
    """
    check_method(method)
    values = np.asarray(p_values, dtype=float)
    known = np.isfinite(values)
    if np.any((values[known] < 0) | (values[known] > 1)):
        raise ValueError("p_values: every value must lie in [0, 1] or be NaN")
    adjusted = np.full(values.shape, np.nan)
    if known.any():
        adjusted[known] = (
            values[known] if method is None else multipletests(values[known], method=method)[1]
        )
    return adjusted


def adjust(
    data: xr.DataArray | pd.DataFrame,
    method: str | None = "fdr_bh",
    *,
    over: Sequence[Hashable] | None = None,
    by: Sequence[Hashable] = (),
    p_value: str = "p_value",
) -> xr.DataArray | pd.DataFrame:
    """Adjust labelled p-values jointly over the dims named; the other dims separate families.

    Parameters
    ----------
    data
        p-values as a DataArray, or a tidy frame with a column of them.
    method
        As in `adjust_p_values`.
    over
        Dims (for a frame: columns among `by`) pooled into one family; None pools everything.
    by
        For a frame, the columns that tell its rows apart; those not in `over` separate the
        families.
    p_value
        Column of the frame.

    Returns
    -------
    xarray.DataArray or pandas.DataFrame
        The adjusted p-values, or the frame with `p_adjusted` added.

    Examples
    --------
    >>> p = xr.DataArray([[0.01, 0.04], [0.2, np.nan]], dims=("layer", "model"))
    >>> adjust(p, over=["layer"]).values
    array([[0.02, 0.04],
           [0.2 ,  nan]])
    """
    if isinstance(data, xr.DataArray):
        unknown = [name for name in over or () if name not in data.dims]
        if unknown:
            raise ValueError(f"over={unknown} are not among {tuple(data.dims)}")
        dims = list(data.dims) if over is None else list(over)
        families = [dim for dim in data.dims if dim not in dims]
        moved = data.transpose(*families, *dims)
        values = np.asarray(moved.values, dtype=float)
        rows = int(np.prod([data.sizes[dim] for dim in families]))
        each = [adjust_p_values(family, method) for family in values.reshape(rows, -1)]
        return moved.copy(data=np.reshape(each, values.shape)).transpose(*data.dims)
    return adjust_frame(data, method, over=over, by=by, p_value=p_value)


def adjust_frame(
    data: pd.DataFrame,
    method: str | None,
    *,
    over: Sequence[Hashable] | None = None,
    by: Sequence[Hashable] = (),
    p_value: str = "p_value",
) -> pd.DataFrame:
    """The frame with `p_adjusted` added; see `adjust`."""
    missing = [name for name in (*by, p_value) if name not in data]
    if missing:
        raise ValueError(f"{missing} are not columns; there are {list(data.columns)}")
    unknown = [name for name in over or () if name not in by]
    if unknown:
        raise ValueError(f"over={unknown} are not among {tuple(by)}")
    frame = data.reset_index(drop=True)
    p_values = frame[p_value].to_numpy(dtype=float)
    separate = [] if over is None else [name for name in by if name not in over]
    adjusted = np.full(p_values.shape, np.nan)
    code = frame.groupby(separate, dropna=False).ngroup() if separate else np.zeros(len(frame), int)
    for family in np.unique(code):
        adjusted[code == family] = adjust_p_values(p_values[code == family], method)
    return frame.assign(p_adjusted=adjusted)


def check_method(method: str | None) -> None:
    """Refuse an unknown name before any long work."""
    if method is not None and method not in METHODS:
        raise ValueError(f"adjust={method!r} is not one of {', '.join(METHODS)}, or None")
