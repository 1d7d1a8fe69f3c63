"""What does the user ask of which variables?

    "kl ~ residual_norm | update_norm + position"   =   response ~ predictor | held fixed

Formulas follow R: `~` parts response from predictors, `|` what is held fixed, and functions such as
`np.log(kl)` or `C(architecture)` are evaluated by formulaic.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import formulaic
import numpy as np
import pandas as pd

_NAME = re.compile(r"(?<![\w.'\"])([A-Za-z_]\w*)(?![\w'\"]|\s*[(.]|\s*=(?!=))")
_NOT_VARIABLES = {"True", "False", "None", "np"}
NORMS = {
    "raw": "residual_norm",
    "relative": "relative_error",
    "standardized": "residual_norm_standardized",
}


@dataclass(frozen=True)
class Association:
    """A response, a predictor and what is held fixed, as expressions."""

    response: str
    predictor: str
    controls: str | None

    @property
    def names(self) -> list[str]:
        """Variables that the expressions read, in order of appearance."""
        parts = [self.response, self.predictor, self.controls or ""]
        return list(dict.fromkeys(name for part in parts for name in variable_names(part)))

    def __str__(self) -> str:
        held = f" | {self.controls}" if self.controls else ""
        return f"{self.response} ~ {self.predictor}{held}"


def parse_association(formula: str, *, norm: str = "raw") -> Association:
    """Read "response ~ predictor | controls".

    Parameters
    ----------
    formula
        One response, one predictor, and after a bar any number of controls.
    norm
        "raw", "relative" or "standardized": which form of the residual's size `residual_norm`
        stands for in the predictor.

    Raises
    ------
    ValueError
        The formula has not this form, or `norm` is unknown or has nothing to act on.

    Examples
    --------
    >>> print(parse_association("kl ~ residual_norm | position", norm="relative"))
    kl ~ relative_error | position
    """
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is not one of {', '.join(NORMS)}")
    if not isinstance(formula, str) or formula.count("~") != 1:
        raise ValueError(
            f"formula={formula!r} is not of the form 'response ~ predictor | controls'"
        )
    response, right = (part.strip() for part in formula.split("~"))
    pieces = [part.strip() for part in split_top_level(right, "|")]
    if len(pieces) > 2 or not response or not all(pieces):
        raise ValueError(
            f"formula={formula!r} is not of the form 'response ~ predictor | controls'"
        )
    predictor = pieces[0]
    if len(split_top_level(predictor, "+")) > 1:
        raise ValueError(
            f"formula={formula!r} has several predictors; a correlation has one. Put what is to "
            "be held fixed behind a bar, as in 'y ~ x | z', or fit ols()"
        )
    if norm != "raw":
        if "residual_norm" not in variable_names(predictor):
            raise ValueError(
                f"norm={norm!r} says which form of residual_norm to use, and the predictor "
                f"{predictor!r} does not contain it"
            )
        predictor = re.sub(r"\bresidual_norm\b", NORMS[norm], predictor)
    return Association(response, predictor, pieces[1] if len(pieces) == 2 else None)


def split_top_level(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside all brackets."""
    pieces, depth, current = [], 0, ""
    for character in text:
        depth += character in "([{"
        depth -= character in ")]}"
        if character == separator and depth == 0:
            pieces.append(current)
            current = ""
        else:
            current += character
    return [*pieces, current]


def variable_names(expression: str) -> list[str]:
    """Variables an expression reads: names that are neither called, nor attributes, nor keywords.

    Examples
    --------
    >>> variable_names("np.log(kl) + C(architecture) + bs(position, df=3)")
    ['kl', 'architecture', 'position']
    """
    found = _NAME.findall(expression)
    return [name for name in dict.fromkeys(found) if name not in _NOT_VARIABLES]


def check_known(names: Iterable[str], known: Iterable[Any], what: str = "formula") -> None:
    """Raise a ValueError that names the nearest known variables for the first unknown one."""
    listed = [str(name) for name in known]
    for name in names:
        if name not in listed:
            raise ValueError(f"{what}: {name!r} is not in the data. {nearest(name, listed)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """'Did you mean ...' for a misspelt name, or the list of what there is."""
    listed = list(known)
    close = difflib.get_close_matches(name, listed, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(match) for match in close)}?"
    return f"There are: {', '.join(sorted(listed))}"


def evaluate(expression: str, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[str]]:
    """Evaluate one or several terms on plain columns, without intercept: (n, k) and the k names.

    A bare name passes through untouched; anything else goes through formulaic, where a factor
    becomes indicators of all its levels but the first.
    """
    if expression in columns and np.asarray(columns[expression]).dtype.kind in "biuf":
        return np.asarray(columns[expression], dtype=float)[:, None], [expression]
    frame = pd.DataFrame({name: columns[name] for name in variable_names(expression)})
    with np.errstate(divide="ignore", invalid="ignore"):  # log(0) is -inf, a value ranks know
        matrix = design(f"1 + {expression}", frame)
    matrix = matrix.drop(columns="Intercept", errors="ignore")
    return matrix.to_numpy(dtype=float), [str(name) for name in matrix.columns]


def design(right_side: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Model matrix of the right side of a formula; missing values stay missing.

    Raises
    ------
    ValueError
        An unknown variable (nearest names are given), or an expression formulaic cannot evaluate.
    """
    check_known(variable_names(right_side), frame.columns)
    try:
        matrix = formulaic.model_matrix(right_side, frame, na_action="ignore", context={"np": np})
    except (formulaic.errors.FormulaicError, SyntaxError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"formula: {right_side!r} cannot be evaluated: {cause}") from error
    return pd.DataFrame(matrix)
