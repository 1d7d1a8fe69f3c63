"""What takes the place of ``h_l`` when a layer is patched?

By default its tokenwise approximation, ``h_l - r_l``.  A dose takes off a share of the residual,
``h_l - f r_l``; ``keep_only`` takes off the tokenwise part, ``h_l - t_l``; and any function of
state, update and residual may say what else it is to be.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from geomstats_lm.controls import other_tokens

PRESETS = ("drop", "drop[factor=f]", "keep_only", "swap")


class Context(NamedTuple):
    """What a replacement may read beside its three arrays."""

    layer: int
    donors: np.ndarray  # (n, dim) residuals of the layer
    pool: np.ndarray  # (n,) the tokens they belong to
    start: int  # number of the window's first token
    rng: np.random.Generator


class Replacement(NamedTuple):
    """A labelled rule that says what is taken off ``h_l``.

    ``takes_off(state, update, residual, context)`` has arrays of shape (token, dim) in float64,
    the tokens of one window; ``factor`` is NaN for what is no dose; ``key`` identifies the rule in
    the settings of a study.
    """

    label: str
    factor: float
    key: str
    takes_off: Callable[[np.ndarray, np.ndarray, np.ndarray, Context], np.ndarray]


def replacements_of(
    replace: str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any] | None,
    factors: Sequence[float] | None,
) -> list[Replacement]:
    """The rules that ``replace=`` and ``factors=`` ask for, in order.

    Parameters
    ----------
    replace : str, callable, sequence or mapping of these, optional
        ``"drop"``, ``"drop[factor=0.5]"``, ``"keep_only"``, ``"swap"``, or a function
        ``(state, update, residual) -> new h_l`` of arrays (token, dim), the tokens of one
        window, with ``state`` = h_{l-1} and ``update`` = h_l - h_{l-1}.  It gets the keyword
        arguments among ``layer`` and ``rng`` that it names.
    factors : sequence of float, optional
        Shares of the residual to take off: a dose-response curve.

    Returns
    -------
    list of Replacement
        Just ``drop`` where neither is given.

    Raises
    ------
    ValueError
        If a name is unknown, a factor not finite, or two rules share a label.

    Examples
    --------
    >>> [r.label for r in replacements_of("keep_only", [0.5, 2])]
    ['keep_only', 'drop[factor=0.5]', 'drop[factor=2]']
    """
    if replace is None:
        given: list[tuple[str | None, Any]] = []
    elif isinstance(replace, Mapping):
        given = [(str(label), rule) for label, rule in replace.items()]
    elif isinstance(replace, str) or callable(replace):
        given = [(None, replace)]
    else:
        given = [(None, rule) for rule in replace]
    rules = [_rule(label, rule) for label, rule in given]
    for factor in factors if factors is not None else ():
        if not np.isfinite(factor):
            raise ValueError(f"factors={list(factors or ())}: accepted are finite numbers")
        rules.append(_dose(float(factor)))
    if replace is None and factors is None:
        rules = [_preset(None, "drop")]
    labels = [rule.label for rule in rules]
    if not rules or len(set(labels)) < len(labels):
        raise ValueError(
            f"replace, factors: they give the labels {labels}; accepted are one or more, each once "
            "(a mapping of label to function names functions)"
        )
    return rules


def project_on(basis: Any) -> Callable[..., np.ndarray]:
    """Keep of the residual just its part in a subspace: ``T_l + P r``.

    Parameters
    ----------
    basis : array_like, shape (dim, m), or mapping of layer to one, or xarray.DataArray
        Spans the subspace; it need not be orthonormal.  A DataArray has the dim ``dim``, one
        other, and perhaps ``layer``, such as ``tokenwise_basis`` of
        :func:`dominant_subspaces` for one function class.

    Returns
    -------
    callable
        For ``replace=``.

    Examples
    --------
    >>> keep_first = project_on(np.eye(3)[:, :1])
    >>> keep_first(np.zeros((1, 3)), np.ones((1, 3)), np.ones((1, 3)), layer=1)
    array([[1., 0., 0.]])
    """
    return _projection(basis, on=True)


def project_off(basis: Any) -> Callable[..., np.ndarray]:
    """Take off the residual's part in a subspace, and keep the rest: ``T_l + r - P r``.

    Parameters
    ----------
    basis
        As for :func:`project_on`.

    Returns
    -------
    callable
        For ``replace=``.

    Examples
    --------
    >>> drop_first = project_off(np.eye(3)[:, :1])
    >>> drop_first(np.zeros((1, 3)), np.ones((1, 3)), np.ones((1, 3)), layer=1)
    array([[0., 1., 1.]])
    """
    return _projection(basis, on=False)


def _projection(basis: Any, *, on: bool) -> Callable[..., np.ndarray]:
    per_layer = _orthonormal(basis)

    def replace(
        state: np.ndarray, update: np.ndarray, residual: np.ndarray, layer: int
    ) -> np.ndarray:
        q = per_layer.get(layer, per_layer.get(0))
        if q is None or len(q) != residual.shape[1]:
            there = {k: v.shape for k, v in per_layer.items()}
            raise ValueError(
                f"basis: layer {layer} needs a basis of {residual.shape[1]} dims, given {there}"
            )
        inside = residual @ q @ q.T
        return state + update - (residual - inside if on else inside)

    replace.__name__ = "project_on" if on else "project_off"
    return replace


def _orthonormal(basis: Any) -> dict[int, np.ndarray]:
    """Orthonormal bases by layer; 0 stands for every layer."""
    if isinstance(basis, xr.DataArray):
        basis = basis.squeeze(
            [d for d in ("model", "function_class") if basis.sizes.get(d) == 1], drop=True
        )
        rest = [d for d in basis.dims if d not in ("layer", "dim")]
        if "dim" not in basis.dims or len(rest) != 1:
            raise ValueError(
                f"basis has dims {basis.dims}; accepted are 'dim', one other and 'layer': select "
                "one function class"
            )
        basis = basis.transpose("layer", "dim", *rest, missing_dims="ignore")
        if "layer" in basis.dims:
            basis = {int(v): basis.sel(layer=v).values for v in basis.layer.values}
        else:
            basis = basis.values
    if not isinstance(basis, Mapping):
        basis = {0: basis}
    bases = {}
    for layer, vectors in basis.items():
        vectors = np.asarray(vectors, dtype=float)
        if vectors.ndim != 2 or not np.isfinite(vectors).all():
            raise ValueError(
                f"basis: layer {layer} has shape {vectors.shape}, not a finite (dim, m)"
            )
        u, s, _ = np.linalg.svd(vectors, full_matrices=False)
        bases[int(layer)] = u[:, s > 1e-10 * s.max(initial=0.0)]
    return bases


def _rule(label: str | None, rule: Any) -> Replacement:
    if isinstance(rule, str):
        return _preset(label, rule)
    if not callable(rule):
        raise ValueError(f"replace={rule!r}: accepted are {', '.join(PRESETS)} and functions")
    return _custom(label or str(getattr(rule, "__name__", "custom")), rule)


def _preset(label: str | None, name: str) -> Replacement:
    dose = re.fullmatch(r"drop\[factor=(.+)\]", name)
    if dose:
        try:
            return _dose(float(dose.group(1)), label)
        except ValueError:
            raise ValueError(f"replace={name!r}: the factor is no number") from None
    if name not in _TAKES_OFF:
        raise ValueError(f"replace={name!r}: accepted are {', '.join(PRESETS)} and functions")
    factor = 1.0 if name == "drop" else np.nan
    return Replacement(label or name, factor, name, _TAKES_OFF[name])


def _dose(factor: float, label: str | None = None) -> Replacement:
    name = f"drop[factor={factor:g}]"
    return Replacement(label or name, factor, name, lambda s, u, r, c: factor * r)


def _custom(label: str, function: Callable[..., Any]) -> Replacement:
    named = inspect.signature(function).parameters.values()
    wants = [p.name for p in named if p.name in ("layer", "rng")]
    anything = any(p.kind is p.VAR_KEYWORD for p in named)

    def takes_off(
        state: np.ndarray, update: np.ndarray, residual: np.ndarray, context: Context
    ) -> np.ndarray:
        more = {n: getattr(context, n) for n in ("layer", "rng") if anything or n in wants}
        new = np.asarray(function(state.copy(), update.copy(), residual.copy(), **more), float)
        if new.shape != state.shape or not np.isfinite(new).all():
            raise ValueError(
                f"replace: {label!r} gave an array of shape {new.shape}"
                f"{'' if np.isfinite(new).all() else ' that is not finite'} at layer "
                f"{context.layer}; accepted is a finite new state of shape {state.shape}"
            )
        return state + update - new

    return Replacement(label, np.nan, f"{label}:{_fingerprint(function):08x}", takes_off)


def _fingerprint(function: Any) -> int:
    """Checksum of a function's code and of what it closes over, so that a study tells it apart."""
    code = getattr(function, "__code__", None)
    if code is None:
        return zlib.crc32(repr(type(function)).encode())
    closed = [c.cell_contents for c in (function.__closure__ or ())]
    parts = [code.co_code, repr([c for c in code.co_consts if not inspect.iscode(c)]).encode()]
    for value in (code.co_names, function.__defaults__, *closed):
        parts.append(_bytes_of(value))
    return zlib.crc32(b"|".join(parts))


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return b"|".join(_bytes_of(v) for pair in value.items() for v in pair)
    if callable(value):
        return str(_fingerprint(value)).encode()
    return repr(value).encode()


def _swap(s: np.ndarray, u: np.ndarray, residual: np.ndarray, context: Context) -> np.ndarray:
    """What is taken off so that the token gets another token's residual, at that one's size."""
    choice = other_tokens(len(residual), context.pool, context.start, context.rng)
    return residual - context.donors[choice] if choice is not None else np.zeros_like(residual)


_TAKES_OFF: dict[str, Callable[..., np.ndarray]] = {
    "drop": lambda s, u, r, c: r,
    "keep_only": lambda s, u, r, c: u - r,
    "swap": _swap,
}
