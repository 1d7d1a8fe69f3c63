"""What does a function class's label say, and which classes are there?

A label is ``name`` for the defaults and ``name[parameter=value,...]`` for what differs from them,
parameters in alphabetical order: ``affine[ridge=0.1,scope=global]``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

WEIGHTS = ("uniform", "tricube", "epanechnikov", "gaussian")
SCOPES = ("local", "global", "global+local")

# name -> its parameters with their defaults; "scope" lists the accepted ones, the default first
_CLASSES: dict[str, dict[str, Any]] = {
    "identity": {"scope": ("none",)},
    "self_only": {"scope": ("none",)},
    "mean": {"scope": ("global",)},
    "token_mean": {"scope": ("global",)},
    "local_mean": {"scope": ("local",), "k": None, "weights": "uniform"},
    "scalar": {"scope": ("local", "global"), "ridge": 0.0, "k": None, "weights": "uniform"},
    "diagonal": {"scope": ("local", "global"), "ridge": 1.0, "k": None, "weights": "uniform"},
    "low_rank": {
        "scope": ("local", "global"),
        "rank": 8,
        "ridge": 1e-2,
        "k": None,
        "weights": "uniform",
    },
    "orthogonal": {"scope": ("local", "global"), "scale": True, "k": None, "weights": "uniform"},
    "mlp": {"scope": ("global",), "hidden": 256},
    "linear": {"scope": SCOPES, "ridge": 1e-2, "k": None, "weights": "uniform"},
    "affine": {"scope": SCOPES, "ridge": 1.0, "k": None, "weights": "uniform"},
}
GLOBAL_RIDGE = 1e-2  # the default rho of every global map that has one
_REGISTERED: dict[str, FunctionClass] = {}


@dataclass(frozen=True)
class FunctionClass:
    """One function class with all its parameters: what a label stands for."""

    name: str
    scope: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    function: Callable[..., Any] | None = None

    def __getitem__(self, parameter: str) -> Any:
        return self.parameters.get(parameter)

    @property
    def from_moments(self) -> bool:
        """Whether it is global and a function of moments alone."""
        return self.is_global and self.name != "mlp" and self.function is None

    @property
    def from_tokens(self) -> bool:
        """Whether it is global and fitted on the tokens themselves."""
        return self.is_global and not self.from_moments

    @property
    def is_local(self) -> bool:
        """Whether it is fitted on neighbours."""
        return self.scope in ("local", "global+local")

    @property
    def is_global(self) -> bool:
        """Whether it is fitted once per layer."""
        return self.scope in ("global", "global+local")


def parse_classes(
    labels: Sequence[str], *, ridge: float | str | None = None
) -> list[FunctionClass]:
    """Function classes named by labels such as ``affine`` or ``affine[ridge=0.1,scope=global]``.

    Parameters
    ----------
    labels : sequence of str
        Parameters left out take the class's own defaults.
    ridge : float or "cv", optional
        For every class that has a ridge and does not name one.

    Returns
    -------
    list of FunctionClass
        Each with its canonical label: parameters that differ from the defaults, alphabetically.

    Raises
    ------
    ValueError
        If a class, a parameter or a value is not known, or two labels mean the same.

    Examples
    --------
    >>> [c.label for c in parse_classes(["affine[scope=global,ridge=0.1]", "linear[ridge=0.01]"])]
    ['affine[ridge=0.1,scope=global]', 'linear']
    """
    if isinstance(labels, str):
        labels = [labels]
    classes = [_parse(label, ridge) for label in labels]
    if not classes:
        raise ValueError(f"classes={labels!r}: name at least one of {', '.join(known_classes())}")
    seen = [c.label for c in classes]
    doubled = sorted({label for label in seen if seen.count(label) > 1})
    if doubled:
        raise ValueError(f"classes name {doubled} more than once")
    return classes


def register_function_class(
    name: str, function: Callable[..., Any], *, scope: str = "local", overwrite: bool = False
) -> None:
    """Make a function of your own a function class, to be named like any other.

    Parameters
    ----------
    name : str
        A Python identifier that no built-in class has.
    function : callable
        For ``scope="local"`` called as ``function(x, X, D, weights, **parameters)`` with states
        ``x`` (n, d), their neighbours ``X`` and these neighbours' updates ``D``, both (n, k, d),
        and ``weights`` (n, k) summing to one; it returns predicted updates (n, d).

        For ``scope="global"`` called once per layer as ``function(X, D, **parameters)`` with the
        reference states and updates, both (N, d); it returns a function from states (n, d) to
        predicted updates (n, d).

        All arrays are float32.  Keyword parameters with defaults become parameters of the label.
    scope : {"local", "global"}
    overwrite : bool
        Whether a class of your own by that name may be replaced.

    Raises
    ------
    ValueError
        If the name is taken or no identifier, the scope is not known, or a parameter has no
        default.

    Examples
    --------
    A local map that takes over the update of the nearest neighbour, shrunk:

    >>> def nearest(x, X, D, weights, *, shrink=1.0):
    ...     return shrink * D[:, 0]
    >>> register_function_class("nearest", nearest, overwrite=True)
    >>> parse_classes(["nearest[shrink=0.5]"])[0].label
    'nearest[shrink=0.5]'

    A global one: updates regressed on the sign of each dim.

    >>> def signs(X, D):
    ...     slope = np.linalg.lstsq(np.sign(X), D, rcond=None)[0]
    ...     return lambda x: np.sign(x) @ slope
    >>> register_function_class("signs", signs, scope="global", overwrite=True)
    """
    if not str(name).isidentifier() or name in _CLASSES:
        raise ValueError(f"name={name!r}: give an identifier other than {', '.join(_CLASSES)}")
    if name in _REGISTERED and not overwrite:
        raise ValueError(f"name={name!r} is registered already; pass overwrite=True to replace it")
    if scope not in ("local", "global"):
        raise ValueError(f"scope={scope!r}: accepted are 'local' and 'global'")
    if not callable(function):
        raise TypeError(f"function is a {type(function).__name__}; give something callable")
    arguments = list(inspect.signature(function).parameters.values())
    extra = arguments[4 if scope == "local" else 2 :]
    bare = [p.name for p in extra if p.default is inspect.Parameter.empty]
    if bare:
        raise ValueError(f"function {name!r}: its parameters {bare} need defaults")
    _REGISTERED[name] = FunctionClass(
        name, scope, {p.name: p.default for p in extra}, name, function
    )


def known_classes() -> list[str]:
    """Names of all function classes, the registered ones last.

    Returns
    -------
    list of str

    Examples
    --------
    >>> known_classes()[:3]
    ['identity', 'self_only', 'mean']
    """
    return [*_CLASSES, *_REGISTERED]


def ridge_of(cls: FunctionClass, ridges: Mapping[str, float] | None = None) -> float:
    """The rho of a class's local map, or of its global map where it has no local one."""
    if cls["ridge"] == "cv":
        return float((ridges or {})[cls.label])
    return float(cls["ridge"] if cls["ridge"] is not None else np.nan)


def _parse(label: str, ridge: float | str | None) -> FunctionClass:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\[(.*)\])?\s*", str(label))
    if not match or match[1] not in known_classes():
        raise ValueError(
            f"classes contain {label!r}; known are {', '.join(known_classes())}, each optionally "
            "with [parameter=value,...]"
        )
    name, inside = match[1], match[2]
    given: dict[str, Any] = {}
    for item in (inside or "").split(","):
        if not item.strip():
            continue
        parameter, equals, text = (piece.strip() for piece in item.partition("="))
        if not equals or parameter in given:
            raise ValueError(f"{label!r}: write each parameter once, as parameter=value")
        given[parameter] = _value(text)
    if name in _REGISTERED:
        return _with_parameters(_REGISTERED[name], given, label)
    defaults = dict(_CLASSES[name])
    scopes = defaults.pop("scope")
    unknown = sorted(set(given) - set(defaults) - ({"scope"} if len(scopes) > 1 else set()))
    if unknown:
        accepted = sorted([*defaults, *(["scope"] if len(scopes) > 1 else [])])
        raise ValueError(f"{label!r}: {name} has no parameter {unknown}; it has {accepted}")
    scope = given.pop("scope", scopes[0])
    if scope not in scopes:
        raise ValueError(f"{label!r}: scope={scope!r}; accepted are {list(scopes)}")
    if scope == "global":
        for parameter in ("k", "weights"):
            defaults.pop(parameter, None)
            if parameter in given:
                raise ValueError(f"{label!r}: a global map has no neighbours, so no {parameter}")
        if defaults.get("ridge"):
            defaults["ridge"] = GLOBAL_RIDGE
    if ridge is not None and defaults.get("ridge"):
        given.setdefault("ridge", ridge)
    parameters = {**defaults, **given}
    _check_parameters(label, parameters)
    shown = {p: v for p, v in parameters.items() if v != defaults[p]}
    if scope != scopes[0]:
        shown["scope"] = scope
    inside = ",".join(f"{p}={_text(shown[p])}" for p in sorted(shown))
    return FunctionClass(name, scope, parameters, f"{name}[{inside}]" if inside else name)


def _with_parameters(cls: FunctionClass, given: Mapping[str, Any], label: str) -> FunctionClass:
    unknown = sorted(set(given) - set(cls.parameters))
    if unknown:
        raise ValueError(
            f"{label!r}: {cls.name} has no parameter {unknown}; it has {sorted(cls.parameters)}"
        )
    shown = {p: v for p, v in given.items() if v != cls.parameters[p]}
    inside = ",".join(f"{p}={_text(shown[p])}" for p in sorted(shown))
    return replace(
        cls,
        parameters={**cls.parameters, **given},
        label=f"{cls.name}[{inside}]" if inside else cls.name,
    )


def _check_parameters(label: str, parameters: Mapping[str, Any]) -> None:
    ridge = parameters.get("ridge", 0.0)
    if ridge != "cv" and not (_is_number(ridge) and np.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"{label!r}: ridge={ridge!r}; accepted are numbers >= 0 and 'cv'")
    for parameter in ("k", "rank", "hidden"):
        value = parameters.get(parameter)
        if value is not None and not (type(value) is int and value >= 1):
            raise ValueError(f"{label!r}: {parameter}={value!r}; accepted are integers >= 1")
    weights = parameters.get("weights", "uniform")
    if weights not in WEIGHTS:
        raise ValueError(f"{label!r}: weights={weights!r}; accepted are {list(WEIGHTS)}")
    if not isinstance(parameters.get("scale", True), bool):
        raise ValueError(f"{label!r}: scale={parameters['scale']!r}; accepted are True and False")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _value(text: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"True": True, "False": False, "None": None}.get(text, text.strip("'\""))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
