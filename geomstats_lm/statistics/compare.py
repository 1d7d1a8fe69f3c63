"""Is one correlation larger than another, measured on the same documents?

    delta = rho_1 - rho_2,   delta_b = rho_1b - rho_2b on the same resample b

Two correlations of one model are dependent; subtracting them resample by resample keeps the
dependence, which comparing two intervals by eye does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from geomstats_lm.statistics.formula import check_known
from geomstats_lm.statistics.inference import infer, warn_of_few
from geomstats_lm.statistics.multiplicity import check_method
from geomstats_lm.statistics.pooling import RankCorrelation, arrange, as_replicates

Pair = tuple[int, int]


def compare_correlations(
    first: RankCorrelation,
    second: RankCorrelation | None = None,
    *,
    over: str | None = None,
    reference: Hashable | None = None,
    pairs: Sequence[tuple[Hashable, Hashable]] | None = None,
    interval: str = "percentile",
    level: float = 0.95,
    adjust: str | None = "fdr_bh",
    adjust_over: Sequence[str] | None = None,
) -> RankCorrelation:
    """Differences between dependent correlations, with intervals from the same resamples.

    Parameters
    ----------
    first, second
        Results of `rank_correlation`. Two results (the real residual and its control, say) are
        compared row by row on the by-columns they share; they must come from the same seed,
        number of resamples and clusters.
    over, reference, pairs
        Within one result: the by-column whose labels are compared, and either the label that all
        others are compared with or the pairs (a, b), read a - b. Without both, all pairs.
    interval
        "percentile" or "basic".
    level, adjust, adjust_over
        As in `rank_correlation`.

    Returns
    -------
    RankCorrelation
        `estimate` is the difference; `estimate_first` and `estimate_second` the two correlations;
        `p_value` tests that the difference is zero.

    Raises
    ------
    ValueError
        Nothing to compare, an unknown label, or results that do not share their resamples.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> from geomstats_lm.statistics import rank_correlation
    >>> rng = np.random.default_rng(0)
    >>> size, noise = rng.normal(size=(2, 600))
    >>> frame = pd.DataFrame({"residual_norm": size, "document": np.repeat(np.arange(30), 20)})
    >>> both = pd.concat([frame.assign(layer=l, kl=size + l * noise) for l in (1, 2)])
    >>> result = rank_correlation(both, n_boot=200)
    >>> bool(compare_correlations(result, over="layer", pairs=[(1, 2)]).tidy()["conf_low"][0] > 0)
    True
    """
    check_method(adjust)
    if interval not in ("percentile", "basic"):
        raise ValueError(f"interval={interval!r} is not one of percentile, basic")
    if (second is None) == (over is None):
        raise ValueError("compare_correlations: give a second result, or over= within one result")
    if second is not None:
        matched, by = _matched(first, second)
        other, labels = (
            second,
            [{name: first.estimates[name].iloc[i] for name in by} for i, _ in matched],
        )
    else:
        assert over is not None
        matched, labels, by = _within(first, over, reference, pairs)
        other = first
    rows, replicates, populations = [], [], []
    for (i, j), label in zip(matched, labels):
        row, difference, population = _difference(first, other, i, j, interval, level)
        rows.append({**label, **row})
        replicates.append(difference)
        populations.append(population)
    settings = {**first.settings, "interval": interval, "level": level, "adjust": adjust}
    table = arrange(rows, by, {}, adjust, adjust_over)
    warn_of_few(table["n_clusters"])
    return RankCorrelation(
        title=f"Differences between correlations: {first.title}",
        estimates=table,
        fits=first.fits.assign(n_rows=len(table)),
        settings=settings,
        notes=["estimate = estimate_first - estimate_second, on shared resamples."],
        by=tuple(by),
        replicates=as_replicates(replicates, table, by),
        populations=tuple(populations),
    )


def _matched(first: RankCorrelation, second: RankCorrelation) -> tuple[list[Pair], tuple[str, ...]]:
    by = tuple(name for name in first.by if name in second.by)
    keys = [
        list(result.estimates[list(by)].itertuples(index=False, name=None))
        if by
        else [()] * len(result.estimates)
        for result in (first, second)
    ]
    for name, key in zip(("first", "second"), keys):
        if len(set(key)) < len(key):
            raise ValueError(
                f"{name}: several rows for one combination of {by}, the shared columns"
            )
    place = {key: j for j, key in enumerate(keys[1])}
    matched = [(i, place[key]) for i, key in enumerate(keys[0]) if key in place]
    if not matched:
        raise ValueError(f"first, second: no rows have equal labels of {by}")
    return matched, by


def _within(
    result: RankCorrelation,
    over: str,
    reference: Hashable | None,
    pairs: Sequence[tuple[Hashable, Hashable]] | None,
) -> tuple[list[Pair], list[dict[str, Any]], tuple[str, ...]]:
    check_known([over], result.by, "over")
    levels = list(dict.fromkeys(result.estimates[over]))
    if reference is not None:
        pairs = [(level, reference) for level in levels if level != reference]
    elif pairs is None:
        pairs = [(b, a) for k, a in enumerate(levels) for b in levels[k + 1 :]]
    unknown = {label for pair in [*pairs, (reference,)] for label in pair} - {*levels, None}
    if unknown:
        raise ValueError(f"{sorted(map(str, unknown))} are not labels of {over!r}: {levels}")
    by = tuple(name for name in result.by if name != over)
    frame = result.estimates
    keys = list(frame[list(by)].itertuples(index=False, name=None)) if by else [()] * len(frame)
    place = {(key, label): i for i, (key, label) in enumerate(zip(keys, frame[over]))}
    matched, labels = [], []
    for key in dict.fromkeys(keys):
        for a, b in pairs:
            if (key, a) in place and (key, b) in place:
                matched.append((place[key, a], place[key, b]))
                labels.append({**dict(zip(by, key)), "first": a, "second": b})
    if not matched:
        raise ValueError(f"over={over!r}: no two of its labels to compare")
    return matched, labels, (*by, "first", "second")


def _difference(
    first: RankCorrelation, second: RankCorrelation, i: int, j: int, interval: str, level: float
) -> tuple[dict[str, Any], np.ndarray, str]:
    populations = first.populations[i], second.populations[j]
    names = [population.rsplit(":", 2)[0] for population in populations]
    draws = [(r.settings["seed"], r.settings["n_boot"]) for r in (first, second)]
    if names[0] == names[1] and (populations[0] != populations[1] or draws[0] != draws[1]):
        raise ValueError(
            f"the two correlations of population {names[0]!r} were not computed on the same "
            "resamples: use one seed, one n_boot and data with the same clusters"
        )
    if draws[0][1] != draws[1][1]:
        raise ValueError(f"n_boot differs: {draws[0][1]} and {draws[1][1]}")
    one, two = first.estimates.iloc[i], second.estimates.iloc[j]
    difference = first.replicates.values[i] - second.replicates.values[j]
    n_clusters = int(min(one["n_clusters"], two["n_clusters"]))
    row = infer(
        float(one["estimate"] - two["estimate"]),
        difference,
        n_clusters=n_clusters,
        kind=interval,
        level=level,
        reason=one["reason"] or two["reason"],
        bounded=False,
    )
    return (
        {
            **row,
            "estimate_first": one["estimate"],
            "estimate_second": two["estimate"],
            "n": int(min(one["n"], two["n"])),
            "n_clusters": n_clusters,
            "method": one["method"],
            "unit": one["unit"],
        },
        difference,
        "&".join(dict.fromkeys(populations)),
    )
