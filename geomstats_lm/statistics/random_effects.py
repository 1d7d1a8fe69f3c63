"""Which random effects does a formula ask for, and can the model below express them?

    "(1 + x | model) + (1 | model:document)"   ->   [term(model; 1, x correlated),
    term(model:document; 1)]

The syntax is lme4's. The model below is statsmodels' MixedLM: one grouping factor with a full
covariance, and independent variance components nested in it. What does not fit is refused by
name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from geomstats_lm.statistics.formula import split_top_level, variable_names


@dataclass(frozen=True)
class RandomTerm:
    """One bar term: `effects` vary over the combinations of the columns `group`."""

    group: tuple[str, ...]
    effects: str
    correlated: bool

    def __str__(self) -> str:
        bar = "|" if self.correlated else "||"
        return f"({self.effects} {bar} {':'.join(self.group)})"


def split_formula(formula: str) -> tuple[str, list[RandomTerm]]:
    """The fixed part of an lme4 formula, and its random terms.

    `(x | a/b)` stands for `(x | a) + (x | a:b)`; `||` leaves out the correlations.

    Raises
    ------
    ValueError
        No random term, or one that is not of the form (effects | group).

    Examples
    --------
    >>> fixed, terms = split_formula("y ~ x + (1 + x | model) + (1 | model:document)")
    >>> fixed, [str(term) for term in terms]
    ('y ~ x', ['(1 + x | model)', '(1 | model:document)'])
    """
    if formula.count("~") != 1:
        raise ValueError(f"formula={formula!r} is not of the form 'response ~ terms'")
    left, right = formula.split("~")
    fixed, terms = [], []
    for piece in split_top_level(right, "+"):
        piece = piece.strip()
        inside = piece[1:-1] if piece.startswith("(") and piece.endswith(")") else ""
        if "|" in inside:
            terms += _random_terms(inside, piece)
        elif "|" in piece:
            raise ValueError(f"random term {piece!r} must stand in brackets: (effects | group)")
        else:
            fixed.append(piece)
    if not terms:
        raise ValueError(f"formula={formula!r} has no random term (effects | group): use ols()")
    return f"{left.strip()} ~ {' + '.join(fixed) or '1'}", terms


def _random_terms(inside: str, piece: str) -> list[RandomTerm]:
    match = re.fullmatch(r"\s*([^|]+?)\s*(\|\|?)\s*([\w:/ ]+?)\s*", inside)
    if match is None:
        raise ValueError(f"random term {piece!r} is not of the form (effects | group)")
    effects, bar, group = match.groups()
    levels = [name.strip() for name in group.split("/")]
    nested = [":".join(levels[: i + 1]) for i in range(len(levels))]
    return [
        RandomTerm(tuple(part.strip() for part in name.split(":")), effects, bar == "|")
        for name in nested
    ]


def group_codes(frame: pd.DataFrame, group: Sequence[str]) -> np.ndarray:
    """Integer code of each row's combination of the grouping columns."""
    return frame.groupby(list(group), sort=True, observed=True).ngroup().to_numpy()


def top_group(frame: pd.DataFrame, terms: Sequence[RandomTerm]) -> RandomTerm | None:
    """The term within whose groups all others are nested in the data; None if effects cross."""
    for candidate in terms:
        outer = group_codes(frame, candidate.group)
        if all(_nested_in(group_codes(frame, term.group), outer) for term in terms):
            return candidate
    return None


def _nested_in(inner: np.ndarray, outer: np.ndarray) -> bool:
    pairs = np.unique(np.column_stack([inner, outer]), axis=0)
    return len(pairs) == len(np.unique(inner))


def n_effects(term: RandomTerm) -> int:
    """Number of written effects, the implied intercept included."""
    parts = [part.strip() for part in split_top_level(term.effects, "+")]
    implied = not {"0", "1", "-1"} & set(parts)
    return implied + sum(part != "0" for part in parts)


def refuse_what_cannot_be_fitted(terms: Sequence[RandomTerm], top: RandomTerm | None) -> None:
    """Name the first term that MixedLM has no place for.

    Raises
    ------
    ValueError
        Correlated slopes on a nested or crossed factor, or on the outermost factor twice.
    """
    full = [term for term in terms if term.correlated and n_effects(term) > 1]
    for term in full:
        names = " + ".join(variable_names(term.effects))
        remedy = (
            f"write ({term.effects} || {':'.join(term.group)}) for uncorrelated effects of {names}"
        )
        if top is None:
            raise ValueError(
                f"random term {term}: correlated effects with crossed factors; {remedy}"
            )
        if term.group != top.group:
            raise ValueError(f"random term {term}: correlated nested slopes; {remedy}")
    if len(full) > 1:
        raise ValueError(f"random term {full[1]}: only one correlated term; put its effects in one")
