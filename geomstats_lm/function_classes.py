"""Which maps may a tokenwise part be, and how does each predict the update from the state?

A class predicts ``D_hat = G(x)``, hence ``T(x) = x + G(x)``.  Local classes are fitted anew for
every query token on its k nearest reference tokens, global ones once per layer; both are array
code here, with no labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from geomstats_lm import global_fits, local_kernels, spectral_kernels

WEIGHTS = ("uniform", "tricube", "epanechnikov", "gaussian")
SCOPES = ("local", "global", "global+local")

# name -> its parameters with their defaults; "scope" lists the accepted ones, the default first
_CLASSES: dict[str, dict[str, Any]] = {
    "identity": {"scope": ("none",)},
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
    def is_local(self) -> bool:
        """Whether it is fitted on neighbours."""
        return self.scope in ("local", "global+local")

    @property
    def is_global(self) -> bool:
        """Whether it is fitted once per layer."""
        return self.scope in ("global", "global+local")


class Neighbourhoods(NamedTuple):
    """The neighbours of a run of queries, and where to find them."""

    queries: np.ndarray  # (n, d) float32, states about ``centre``
    neighbours: np.ndarray  # (n, k) int64, rows of ``states``
    distances: np.ndarray  # (n, k) float32, nearest first
    states: np.ndarray  # (N, d) float32, reference states about ``centre``
    centre: np.ndarray  # (d,) float32
    targets: np.ndarray  # (N, d) float32


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


def known_classes() -> list[str]:
    """Names of all function classes, the registered ones last."""
    return [*_CLASSES, *_REGISTERED]


def local_predictions(
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    *,
    k: int,
    target: str = "update",
    ridges: Mapping[str, float] | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Predictions of all local maps, those of one neighbourhood and weighting fitted together.

    Parameters
    ----------
    classes : sequence of FunctionClass
        Local ones.
    data : Neighbourhoods
        With at least as many neighbours as any class asks for.
    k : int
        Neighbours of the classes that do not name their own number.
    target : {"update", "state"}
        What ``data.targets`` are.
    ridges : mapping of label to float, optional
        Chosen values for the classes with ``ridge=cv``.

    Returns
    -------
    predictions : numpy.ndarray of float32, shape (classes, n, d)
    effective_df : numpy.ndarray of float32, shape (classes, n)
    reconstructed : dict of label to numpy.ndarray, shape (n, d)
        For global+local classes X' w, the state as the neighbours combine to it.
    """
    n, d = data.queries.shape
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    effective_df = np.full((len(classes), n), np.nan, dtype=np.float32)
    reconstructed = {}
    groups: dict[tuple[int, str], list[int]] = {}
    for c, cls in enumerate(classes):
        groups.setdefault((cls["k"] or k, cls["weights"] or "uniform"), []).append(c)
    for (size, weighting), members in groups.items():
        part = data._replace(
            neighbours=np.ascontiguousarray(data.neighbours[:, :size]),
            distances=data.distances[:, :size],
        )
        weights = kernel_weights(part.distances, weighting)
        for fit, chosen in _by_kernel(classes, members, target):
            fitted, df, rest = fit([classes[c] for c in chosen], part, weights, ridges or {})
            predictions[chosen], effective_df[chosen] = fitted, df
            reconstructed.update(rest)
    return predictions, effective_df, reconstructed


def kernel_weights(distances: np.ndarray, weighting: str) -> np.ndarray:
    """Weights of neighbours, float32 of the shape of ``distances`` (n, k), each row summing to 1.

    ``u = distance / (1.0001 * distance of the k-th)``; tricube ``(1 - u^3)^3``, epanechnikov
    ``1 - u^2``, gaussian ``exp(-2 u^2)``; uniform where all distances are zero.
    """
    far = distances[:, -1:].astype(np.float64) * 1.0001
    u = np.divide(distances, far, out=np.zeros(distances.shape), where=far > 0)
    if weighting == "tricube":
        weights = (1 - u**3) ** 3
    elif weighting == "epanechnikov":
        weights = 1 - u**2
    elif weighting == "gaussian":
        weights = np.exp(-2 * u**2)
    else:
        weights = np.ones(distances.shape)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


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


_KINDS = {
    "local_mean": local_kernels.LOCAL_MEAN,
    "scalar": local_kernels.SCALAR,
    "diagonal": local_kernels.DIAGONAL,
    "linear": local_kernels.LINEAR,
    "affine": local_kernels.AFFINE,
    "low_rank": local_kernels.LOW_RANK,
}
_SYSTEMS = ("linear", "affine", "low_rank")  # the classes that solve a k x k system


def _by_kernel(
    classes: Sequence[FunctionClass], members: Sequence[int], target: str
) -> list[tuple[Callable[..., Any], list[int]]]:
    """The classes among ``members`` that one kernel fits in one pass, with that kernel."""
    turned = [c for c in members if classes[c].name == "orthogonal"]
    own = [c for c in members if classes[c].function is not None]
    combined = [c for c in members if c not in turned and c not in own]
    passes: list[tuple[Callable[..., Any], list[int]]] = [
        (_fit_combinations, combined), (partial(_fit_orthogonal, target), turned),
    ]  # fmt: skip
    passes += [(_fit_registered, [c]) for c in own]
    return [(fit, chosen) for fit, chosen in passes if chosen]


def _fit_combinations(
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    weights: np.ndarray,
    ridges: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Local maps that share a Gram matrix, in one pass."""
    n, d = data.queries.shape
    systems: list[tuple[bool, float]] = []
    factors = np.full(len(classes), -1, dtype=np.int64)
    kinds = np.empty(len(classes), dtype=np.int64)
    rho = np.zeros(len(classes), dtype=np.float64)
    ranks = np.ones(len(classes), dtype=np.int64)
    rest = np.full(len(classes), -1, dtype=np.int64)
    for c, cls in enumerate(classes):
        kinds[c] = _KINDS[cls.name]
        rho[c] = np.nan_to_num(ridge_of(cls, ridges))
        ranks[c] = cls["rank"] or 1
        if cls.name in _SYSTEMS:
            system = (cls.name == "affine", rho[c])
            if system not in systems:
                systems.append(system)
            factors[c] = systems.index(system)
        if cls.scope == "global+local":
            rest[c] = rest.max() + 1
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    reconstructed = np.empty((rest.max() + 1, n, d), dtype=np.float32)
    df = np.empty((len(classes), n), dtype=np.float32)
    local_kernels.fit_neighbourhoods(
        np.ascontiguousarray(data.queries), data.neighbours, weights, data.states, data.centre,
        data.targets, np.array([s[0] for s in systems], dtype=bool),
        np.array([s[1] for s in systems], dtype=np.float64), kinds, factors, rho, ranks,
        predictions, rest, reconstructed, df,
        True if local_kernels.LOW_RANK in kinds else None,
    )  # fmt: skip
    left = {cls.label: reconstructed[r] for cls, r in zip(classes, rest) if r >= 0}
    return predictions, df, left


def _fit_orthogonal(
    target: str,
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    weights: np.ndarray,
    ridges: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    n, d = data.queries.shape
    k = data.neighbours.shape[1]
    predictions = np.empty((len(classes), n, d), dtype=np.float32)
    spectral_kernels.fit_orthogonal(
        np.ascontiguousarray(data.queries), data.neighbours, weights, data.states, data.centre,
        data.targets, target == "state", np.array([c["scale"] for c in classes]), predictions,
    )  # fmt: skip
    df = np.empty((len(classes), n), dtype=np.float32)
    for c, cls in enumerate(classes):
        df[c] = orthogonal_df(min(k, d), d, cls["scale"])
    return predictions, df, {}


def orthogonal_df(m: int, d: int, scale: bool) -> float:
    """Coefficients per output dim of an orthogonal map that m directions determine."""
    return (m * d - m * (m + 1) / 2 + scale) / d


def _fit_registered(
    classes: Sequence[FunctionClass],
    data: Neighbourhoods,
    weights: np.ndarray,
    ridges: Mapping[str, float],
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """A user's own local class, called on as many tokens at a time as fit in 64 MB."""
    (cls,) = classes
    assert cls.function is not None
    n, d = data.queries.shape
    k = data.neighbours.shape[1]
    predictions = np.empty((1, n, d), dtype=np.float32)
    run = max(1, 2**24 // (k * d))
    for start in range(0, n, run):
        rows = data.neighbours[start : start + run]
        x = data.queries[start : start + run] + data.centre
        returned = cls.function(
            x, data.states[rows] + data.centre, data.targets[rows],
            weights[start : start + run], **cls.parameters,
        )  # fmt: skip
        _check_returned(cls.name, returned, x.shape)
        predictions[0, start : start + run] = returned
    return predictions, np.full((1, n), np.nan, dtype=np.float32), {}


def _check_returned(name: str, returned: Any, shape: tuple[int, ...]) -> None:
    if np.shape(returned) != shape:
        raise ValueError(
            f"function class {name!r} returned shape {np.shape(returned)}; "
            f"predictions for these tokens have shape {shape}"
        )


def global_maps(
    classes: Sequence[FunctionClass],
    moments: global_fits.Moments,
    *,
    ridges: Mapping[str, float],
    target: str = "update",
) -> dict[str, global_fits.GlobalMap]:
    """The fitted global map of every class that has one, by label."""
    maps = {}
    for cls in classes:
        if cls.is_global:
            rho = GLOBAL_RIDGE if cls.scope == "global+local" else ridge_of(cls, ridges)
            maps[cls.label] = global_fits.fit(
                cls.name, moments, ridge=rho, rank=cls["rank"], scale=cls["scale"], target=target
            )
    return maps
