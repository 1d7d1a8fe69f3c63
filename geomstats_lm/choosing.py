"""Which k, ridge and rank predict held-out updates best, and would more reference text help?

Held-out relative error ``e = mean over tokens of ||D - D_hat|| / ||D||``, with standard errors
over documents; against the number N of reference tokens, ``e(N) = limit + b N^-a``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from geomstats_lm.class_labels import FunctionClass, parse_classes
from geomstats_lm.decompose import decomposition_of, usable_references

EXPONENTS = np.linspace(0.05, 2, 79)  # of the reference curve, searched exhaustively


@dataclass(frozen=True)
class CrossValidation:
    """Held-out error over a grid of settings.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per layer, class and setting: ``layer``, ``function_class`` (its full label),
        ``class_name``, ``k``, ``ridge``, ``rank``, ``hidden``, ``effective_df`` (the mean over
        tokens of the degrees of freedom of the fit, where the class has any), ``estimate``,
        ``std_error``, ``n`` tokens, ``n_clusters`` documents.
    settings : dict
        How it was made.
    """

    table: pd.DataFrame
    settings: dict[str, Any]

    def tidy(self) -> pd.DataFrame:
        """One row per setting."""
        return self.table.copy()

    def glance(self) -> pd.DataFrame:
        """One row per layer and class: the setting with the least error."""
        best = self.table.groupby(["layer", "class_name"], sort=True)["estimate"].idxmin()
        return self.table.loc[best].reset_index(drop=True)

    def summary(self) -> str:
        """What to choose, as text."""
        pooled = self.table.groupby(["class_name", "function_class"])["estimate"].mean()
        lines = ["Held-out relative error, mean over layers; the least of each class:"]
        for name, errors in pooled.groupby(level=0):
            best: Any = errors.idxmin()
            lines.append(f"  {name}: {best[1]}  {errors.min():.3f}")
        return "\n".join(lines)

    def plot(self) -> Any:
        """Error against k (against ridge where one k was tried), a panel per class and layer."""
        table = self.table
        across = "k" if table["k"].nunique() > 1 else "ridge"
        hue = "ridge" if across == "k" and table["ridge"].nunique() > 1 else "rank"
        hues = hue if table[hue].nunique() > 1 else None
        return _facets(table, across, hues, "held-out relative error")


@dataclass(frozen=True)
class ReferenceCurve:
    """Held-out error against the number of reference tokens.

    Attributes
    ----------
    table : pandas.DataFrame
        One row per layer, class and size: ``layer``, ``function_class``, ``n_reference``,
        ``estimate``, ``std_error``, ``n``, ``n_clusters``, ``fitted``.
    limits : pandas.DataFrame
        One row per layer and class: ``estimate`` the fitted limit, ``conf_low``, ``conf_high``,
        ``exponent``, ``error_at_largest``, ``n_reference`` the largest.
    settings : dict
        How it was made.
    """

    table: pd.DataFrame
    limits: pd.DataFrame
    settings: dict[str, Any]

    def tidy(self) -> pd.DataFrame:
        """One row per size."""
        return self.table.copy()

    def glance(self) -> pd.DataFrame:
        """One row per fitted limit."""
        return self.limits.copy()

    def summary(self) -> str:
        """The limits as text."""
        lines = [f"Limit of e(N) as N grows, {self.settings['level']:.0%} interval:"]
        for row in self.limits.itertuples():
            lines.append(
                f"  layer {row.layer}, {row.function_class}: {row.error_at_largest:.3f} at "
                f"N = {row.n_reference}, limit {row.estimate:.3f} "
                f"[{row.conf_low:.3f}, {row.conf_high:.3f}]"
            )
        return "\n".join(lines)

    def plot(self) -> Any:
        """Error against N on a log axis, with the fitted curve's values."""
        table = self.table.assign(class_name="all classes")
        return _facets(table, "n_reference", "function_class", "held-out relative error")


def cross_validate(
    data: xr.DataTree | xr.Dataset,
    classes: Sequence[str] = ("linear", "affine"),
    *,
    k: Sequence[int] = (8, 16, 32, 64),
    ridge: Sequence[float] = (0.01, 0.1, 1.0, 10.0),
    rank: Sequence[int] = (1, 2, 4, 8, 16),
    windows: int | None = 64,
    seed: int = 0,
    **options: Any,
) -> CrossValidation:
    """Held-out relative error over k, ridge and rank, by layer.

    Reference tokens are predicted from reference tokens of other documents (global maps leave out
    the token's document), so that the evaluation documents stay untouched.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        As for :func:`decompose`.
    classes : sequence of str
        Each is tried with every k, ridge and rank that it has and that its label leaves open.
    k, ridge, rank : sequences
        The grid.
    windows : int, optional
        Random reference windows that are predicted; None for all.
    seed : int
        Of the choice of windows.
    **options
        ``target``, ``metric``, ``exclude``, ``reference``, ``layers``, ``device`` of
        :func:`decompose`.

    Returns
    -------
    CrossValidation
        With ``tidy()``, ``glance()``, ``summary()`` and ``plot()``.

    Raises
    ------
    ValueError
        If a grid is empty or an option is not known.

    Examples
    --------
    >>> from geomstats_lm import extract
    >>> from geomstats_lm.datasets import example_corpus, load_example
    >>> cut = dict(length=32, n_windows=(12, 2), progress=False)
    >>> states = extract(load_example("gpt2"), example_corpus(), **cut)
    >>> chosen = cross_validate(states, ["affine"], k=(4, 8), ridge=(1.0,), layers=[2])
    >>> chosen.tidy().function_class.tolist()
    ['affine[k=4]', 'affine[k=8]']
    """
    for name, values in (("k", k), ("ridge", ridge), ("rank", rank)):
        if not len(values):
            raise ValueError(f"{name}={values!r}: give at least one value to try")
    rows = {}
    for cls in parse_classes(classes):
        grid: dict[str, Sequence[Any]] = {}
        if cls.is_local and cls["k"] is None:
            grid["k"] = k
        if cls["ridge"] and "ridge=" not in cls.label:
            grid["ridge"] = ridge
        if cls["rank"] is not None and "rank=" not in cls.label:
            grid["rank"] = rank
        for values in itertools.product(*grid.values()):
            setting = dict(zip(grid, values))
            if setting.get("rank", 1) > setting.get("k", max(k)):
                continue
            own = {**cls.parameters, **setting}
            if "scope=" in cls.label:
                own["scope"] = cls.scope
            label = _label(cls, own)
            rows[label] = {
                "class_name": cls.label, "k": own.get("k"), "ridge": own.get("ridge"),
                "rank": own.get("rank"), "hidden": own.get("hidden"),
            }  # fmt: skip
    rng = np.random.default_rng(seed)
    parts = decomposition_of(
        data, list(rows), k=int(max(k)), tokens="reference", seed=seed, windows=windows, rng=rng,
        keep=("update", "residual"), **options,
    )  # fmt: skip
    errors = _token_errors(parts)
    table = _means(errors).reset_index()
    extra = pd.DataFrame.from_dict(rows, orient="index").rename_axis("function_class")
    table = table.merge(extra.reset_index(), on="function_class")
    freedom = parts["effective_df"].isel(model=0, drop=True).mean("token").to_series()
    table = table.merge(freedom.rename("effective_df").reset_index(),
                        on=["layer", "function_class"])  # fmt: skip
    order = ["layer", "function_class", "class_name", "k", "ridge", "rank", "hidden",
             "effective_df", "estimate", "std_error", "n", "n_clusters"]  # fmt: skip
    settings = {"windows": windows, "seed": seed, "exclude": parts.attrs["exclude"], **options}
    return CrossValidation(table[order], settings)


def reference_curve(
    data: xr.DataTree | xr.Dataset,
    classes: Sequence[str] = ("affine", "affine[scope=global]"),
    *,
    sizes: Sequence[int] | None = None,
    k: int = 32,
    windows: int | None = 64,
    draws: int = 500,
    level: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> ReferenceCurve:
    """Held-out error against the number of reference tokens, and its limit.

    References are nested sets of whole documents in a random order; the tokens predicted are
    those of evaluation documents.  ``e(N) = limit + b N^-a`` is fitted by least squares with
    ``limit, b >= 0``, its interval is the percentile interval over resampled evaluation documents.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        As for :func:`decompose`.
    classes : sequence of str
        Labels.
    sizes : sequence of int, optional
        Numbers of reference tokens, at least four; six by halving down from all by default.
    k : int
        Neighbours of local fits.
    windows : int, optional
        Random evaluation windows that are predicted; None for all.
    draws : int
        Bootstrap draws of documents.
    level : float
        Of the interval.
    seed : int
        Of documents' order, windows and draws.
    **options
        ``ridge``, ``target``, ``metric``, ``exclude``, ``layers``, ``device`` of
        :func:`decompose`.

    Returns
    -------
    ReferenceCurve
        With ``tidy()``, ``glance()``, ``summary()`` and ``plot()``.

    Raises
    ------
    ValueError
        If there are fewer than four sizes or more tokens are asked for than there are.

    Examples
    --------
    >>> from geomstats_lm import extract
    >>> from geomstats_lm.datasets import example_corpus, load_example
    >>> cut = dict(length=32, n_windows=(12, 2), progress=False)
    >>> states = extract(load_example("gpt2"), example_corpus(), **cut)
    >>> curve = reference_curve(states, ["mean"], sizes=(50, 100, 200, 300), k=4, layers=[2])
    >>> curve.tidy().n_reference.tolist()
    [50, 100, 200, 300]
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}: accepted are numbers between 0 and 1")
    per_size = {}
    for size in _sizes(data, sizes, k):
        parts = decomposition_of(
            data, classes, k=k, reference=size, seed=seed, windows=windows,
            rng=np.random.default_rng(seed), keep=("update", "residual"), **options,
        )  # fmt: skip
        per_size[size] = _token_errors(parts)
    table = pd.concat({n: _means(e) for n, e in per_size.items()}, names=["n_reference"])
    table = table.reset_index()
    fitted, limits = [], []
    rng = np.random.default_rng(seed)
    largest = max(per_size)
    by_cell = {n: errors.sort_index() for n, errors in per_size.items()}  # looked up cell by cell
    for keys, part in table.groupby(["layer", "function_class"], sort=False):
        totals, counts = _by_document({n: e.xs(keys) for n, e in by_cell.items()})
        picks = rng.integers(0, totals.shape[1], (draws, totals.shape[1]))
        drawn = totals[:, picks].sum(2) / counts[picks].sum(1)  # (sizes, draws)
        curves = np.c_[part["estimate"].to_numpy(), drawn].T
        limit, slope, exponent = fit_power_law(np.array(list(per_size), float), curves)
        low, high = np.quantile(limit[1:], [(1 - level) / 2, (1 + level) / 2])
        fitted.append(limit[0] + slope[0] * part["n_reference"].to_numpy() ** -exponent[0])
        limits.append(
            {
                "layer": keys[0], "function_class": keys[1], "estimate": limit[0],
                "conf_low": low, "conf_high": high, "exponent": exponent[0],
                "error_at_largest": part["estimate"].to_numpy()[-1], "n_reference": largest,
            }
        )  # fmt: skip
        table.loc[part.index, "fitted"] = fitted[-1]
    settings = {"k": k, "level": level, "draws": draws, "windows": windows, "seed": seed, **options}
    return ReferenceCurve(table, pd.DataFrame(limits), settings)


def fit_power_law(n: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least squares of ``limit + slope n^-exponent`` with limit, slope >= 0, for each row.

    Parameters
    ----------
    n : numpy.ndarray, shape (sizes,)
    values : numpy.ndarray, shape (rows, sizes)

    Returns
    -------
    limit, slope, exponent : numpy.ndarray, shape (rows,)
    """
    best = np.full(len(values), np.inf)
    limit, slope, exponent = (np.zeros(len(values)) for _ in range(3))
    for a in EXPONENTS:
        x = (n / n.max()) ** -a
        centred = x - x.mean()
        b = np.maximum(values @ centred / (centred @ centred), 0)
        c = values.mean(1) - b * x.mean()
        # where the limit would be negative it is zero, and b follows
        through = np.maximum(values @ x / (x @ x), 0)
        b, c = np.where(c < 0, through, b), np.maximum(c, 0)
        loss = np.sum((values - c[:, None] - b[:, None] * x) ** 2, 1)
        better = loss < best
        best = np.where(better, loss, best)
        limit, slope = np.where(better, c, limit), np.where(better, b * n.max() ** a, slope)
        exponent = np.where(better, a, exponent)
    return limit, slope, exponent


def _label(cls: FunctionClass, parameters: Mapping[str, Any]) -> str:
    given = [f"{p}={v}" for p, v in parameters.items() if v is not None]
    return parse_classes([f"{cls.name}[{','.join(given)}]" if given else cls.name])[0].label


def _sizes(data: Any, sizes: Sequence[int] | None, k: int) -> list[int]:
    available = usable_references(data)
    if sizes is None:
        sizes = [n for n in (available >> shift for shift in range(5, -1, -1)) if n > 2 * k]
    chosen = sorted({int(n) for n in sizes})
    if len(chosen) < 4:
        raise ValueError(
            f"sizes={chosen}: at least 4 are needed for a limit; there are {available} usable "
            f"reference tokens and k={k}"
        )
    if chosen[-1] > available:
        raise ValueError(f"sizes={chosen}: there are only {available} usable reference tokens")
    return chosen


def _token_errors(parts: xr.Dataset) -> pd.Series:
    """||r|| / ||D|| of usable tokens, indexed by layer, function_class, document and token."""
    parts = parts.isel(model=0)
    size = (parts["update"].astype(np.float64) ** 2).sum("dim") ** 0.5
    left = (parts["residual"].astype(np.float64) ** 2).sum("dim") ** 0.5
    usable = (parts["position"] > 0) & ~parts["is_special"] & ~parts["is_massive"] & (size > 0)
    ratio: xr.DataArray = left / size
    error = ratio.where(usable).compute()
    frame = error.transpose("layer", "function_class", "token").to_series().dropna()
    document = parts["document"].to_series()
    index = frame.index.to_frame(index=False)
    index["document"] = document.loc[index["token"]].to_numpy()
    keys = ["layer", "function_class", "document", "token"]
    return pd.Series(frame.to_numpy(), pd.MultiIndex.from_frame(index[keys]), name="error")


def _means(errors: pd.Series) -> pd.DataFrame:
    """Mean over tokens by layer and class, its standard error over documents."""
    rows = {}
    for keys, part in errors.groupby(level=["layer", "function_class"], sort=False):
        centred = (part - part.mean()).groupby(level="document").sum().to_numpy()
        g = len(centred)
        se = np.sqrt(g / (g - 1) * np.sum(centred**2)) / len(part) if g > 1 else np.nan
        rows[keys] = part.mean(), se, len(part), g
    frame = pd.DataFrame.from_dict(
        rows, orient="index", columns=["estimate", "std_error", "n", "n_clusters"]
    )
    frame.index = pd.MultiIndex.from_tuples(frame.index, names=["layer", "function_class"])
    return frame


def _by_document(errors: Mapping[int, pd.Series]) -> tuple[np.ndarray, np.ndarray]:
    """Sums of errors (sizes, documents) and numbers of tokens (documents,)."""
    sums = {n: e.groupby(level="document").sum() for n, e in errors.items()}
    counts = next(iter(errors.values())).groupby(level="document").size()
    return np.stack([s.to_numpy() for s in sums.values()]), counts.to_numpy()


def _facets(table: pd.DataFrame, across: str, hue: str | None, label: str) -> Any:
    import seaborn as sns

    grid = sns.relplot(
        data=table, x=across, y="estimate", hue=hue, col="layer", row="class_name", kind="line",
        marker="o", height=2.6, aspect=1.1, facet_kws={"sharey": "row"},
        **({} if hue is None else {"palette": "viridis"}),
    )  # fmt: skip
    grid.set(xscale="log")
    grid.set_axis_labels(across.replace("_", " "), label)
    return grid.figure
