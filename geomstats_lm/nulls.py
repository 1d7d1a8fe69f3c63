"""What would the geometry be if the residual's direction meant nothing?

``forced`` keeps nothing but the residual's size: at a right angle ``cos(D, t) = sqrt(1 - e^2)``;
``isotropic`` draws ``r' = |r| u`` with u uniform on the sphere, ``exchanged`` takes another token's
residual, ``r'_i = |r_i| r_j / |r_j|``, and both measure ``D' = t + r'`` anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from geomstats_lm.controls import donor_pool
from geomstats_lm.geometry import decomposition_of, measure, usable_tokens
from geomstats_lm.geometry_measures import norm

BLOCK = 64  # tokens that share a random stream, so that chunks change no draw
EAGER_SIZE = 1 << 25  # numbers drawn at once where the data are in memory anyway
NODES = 48  # of the quadrature over angles


def forced(geometry: xr.Dataset) -> xr.Dataset:
    """What follows from the size of the residual alone.

    Parameters
    ----------
    geometry : xarray.Dataset
        From :func:`geomstats_lm.geometry`.

    Returns
    -------
    xarray.Dataset
        With a leading dim ``null``: cosines and angles of update, tokenwise part and residual at
        a right angle between the latter two (NaN where e >= 1), and ``energy_residual`` = m/d.

    Examples
    --------
    >>> size = xr.DataArray([0.6], dims="token")
    >>> measured = xr.Dataset({"relative_error": size, "angle_residual_tokenwise": 80 + 0 * size})
    >>> forced(measured).cos_update_tokenwise.values
    array([[0.8]])
    """
    error = geometry["relative_error"].astype(float)
    error = error.where(error < 1)
    right = xr.where(geometry["angle_residual_tokenwise"].notnull(), 90.0, np.nan)
    along = np.sqrt(1 - error**2)
    result = {
        "cos_update_tokenwise": along,
        "cos_update_residual": error,
        "cos_residual_tokenwise": 0 * right,
        "angle_update_tokenwise": np.degrees(np.arccos(along)),
        "angle_update_residual": np.degrees(np.arccos(error)),
        "angle_residual_tokenwise": right,
    }
    if "energy_forced" in geometry:
        seen = geometry["energy_residual"].notnull()
        result["energy_residual"] = geometry["energy_forced"].where(seen)
    return xr.Dataset(result).expand_dims(null=["forced"])


def isotropic(
    data: xr.DataTree | xr.Dataset,
    *,
    draws: int = 20,
    subspace: xr.Dataset | None = None,
    exclude: bool = True,
    seed: int = 0,
) -> xr.Dataset:
    """The geometry with every residual turned to a uniformly random direction, its norm kept.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or a decomposition.
    draws : int
        How often.
    subspace : xarray.Dataset, optional
        From :func:`dominant_subspaces`, for the energies.
    exclude : bool
        NaN at tokens that are left out of statistics.
    seed : int

    Returns
    -------
    xarray.Dataset
        The variables of :func:`geomstats_lm.geometry` with a leading dim ``null``, and ``draw``.
        Draws depend on seed, layer, class and token, not on chunks or scheduler.

    Examples
    --------
    >>> dims = ("model", "layer", "token", "dim")
    >>> update = xr.DataArray(np.ones((1, 1, 2, 4)), dims=dims)
    >>> tokenwise = 0.5 * update.expand_dims(function_class=["half"])
    >>> data = xr.Dataset({"update": update, "state": update, "tokenwise": tokenwise})
    >>> isotropic(data, draws=3).residual_norm.values.round(6).ravel()
    array([1., 1., 1., 1., 1., 1.], dtype=float32)
    """
    return _redrawn(data, "isotropic", _isotropic, draws, subspace, exclude, seed, donors=False)


def exchanged(
    data: xr.DataTree | xr.Dataset,
    *,
    draws: int = 20,
    subspace: xr.Dataset | None = None,
    exclude: bool = True,
    seed: int = 0,
) -> xr.Dataset:
    """The geometry with the direction of another token's residual, of the same layer and class.

    Parameters
    ----------
    data, draws, subspace, exclude, seed
        As for :func:`isotropic`.

    Returns
    -------
    xarray.Dataset
        As for :func:`isotropic`.  Donors are up to 2048 tokens usable at all layers.

    Raises
    ------
    ValueError
        If fewer than two tokens are usable at all layers.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_node
    >>> exchanged(example_node(), draws=2).sizes["draw"]
    2
    """
    return _redrawn(data, "exchanged", _exchanged, draws, subspace, exclude, seed, donors=True)


def direction_spread(ratio: np.ndarray, dim: int) -> np.ndarray:
    """How cosines differ from their forced values when the residual's direction is random.

    Parameters
    ----------
    ratio : numpy.ndarray
        ``|r| / |t|`` of tokens.
    dim : int
        Number of dims d >= 2.

    Returns
    -------
    numpy.ndarray of float64, shape (..., 2, 2)
        Mean and variance (last axis) of ``cos(D, t) - sqrt(1 - e^2)`` and of ``cos(D, r) - e``
        over directions of r uniform on the sphere, among those with e < 1.

    Notes
    -----
    The angle of r and t then has density proportional to ``sin^(d-2)``.  The first difference is
    never negative, and about ``ratio^2 / (2 d sqrt(1 + ratio^2))`` on average, so that an interval
    about zero would call any direction distinct; the second is about
    ``-ratio / (d (1 + ratio^2)^1.5)``.

    Examples
    --------
    >>> direction_spread(np.array(0.5), 1000)[0, 0].round(6)
    np.float64(0.000112)
    """
    ratio = np.asarray(ratio, dtype=float)
    known = np.isfinite(ratio)
    flat = np.where(known, ratio, 1.0).reshape(-1, 1)
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    wide = min(np.pi / 2, 9 / np.sqrt(dim))  # beyond nine standard deviations there is nothing
    last = np.where(flat > 0.5, np.arccos(-0.5 / np.maximum(flat, 0.5)), np.pi)  # e = 1
    low, high = np.pi / 2 - wide, np.minimum(np.pi / 2 + wide, last)
    theta = low + (high - low) * (nodes + 1) / 2
    density = weights * np.sin(theta) ** (dim - 2)
    density /= density.sum(axis=1, keepdims=True)
    c = np.cos(theta)
    size = np.sqrt(np.maximum(1 + 2 * flat * c + flat**2, 1e-300))
    along = (1 + flat * c - np.sqrt(np.maximum(1 + 2 * flat * c, 0))) / size
    across = c / size  # (s + c) / |D| - s / |D|, in units of |t|
    means = np.stack([(density * v).sum(axis=1) for v in (along, across)], axis=-1)
    squares = np.stack([(density * v**2).sum(axis=1) for v in (along, across)], axis=-1)
    result = np.stack([means, np.maximum(squares - means**2, 0)], axis=-1)
    result[~known.reshape(-1)] = np.nan
    return result.reshape(*ratio.shape, 2, 2)


def angle_variance(dim: int) -> float:
    """Variance, in squared degrees, of the angle of a random direction to a given one."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    turn = min(np.pi / 2, 9 / np.sqrt(dim)) * nodes
    density = weights * np.cos(turn) ** (dim - 2)
    return float((density * np.degrees(turn) ** 2).sum() / density.sum())


def _redrawn(
    data: xr.DataTree | xr.Dataset,
    name: str,
    draw_block: Callable[..., np.ndarray],
    draws: int,
    subspace: xr.Dataset | None,
    exclude: bool,
    seed: int,
    *,
    donors: bool,
) -> xr.Dataset:
    if not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ValueError(f"draws={draws!r}: accepted are integers >= 1")
    decomposition = decomposition_of(data)
    single = decomposition["update"].chunks is None
    if single and decomposition.tokenwise.size * draws > EAGER_SIZE:
        # bounded memory: draws are made chunk by chunk
        decomposition = decomposition.chunk({"layer": 1, "function_class": 1, "token": 4096})
    lazy = decomposition.chunk({"dim": -1})
    usable = usable_tokens(lazy)
    own = (lazy["update"] - lazy.tokenwise).transpose(*lazy.tokenwise.dims)
    streams, tokens = _streams(own, seed)
    extra: list[xr.DataArray] = []
    core: list[list[str]] = []
    if donors:
        pool = _pool(usable, seed)
        given = own.isel(token=pool).rename(token="donor").drop_vars("donor", errors="ignore")
        given = given.drop_vars([n for n, c in given.coords.items() if "donor" in c.dims])
        extra = [given.chunk({"donor": -1}), xr.DataArray(pool, dims="donor")]
        core = [["donor", "dim"], ["donor"]]
    redrawn = [
        xr.apply_ufunc(
            draw_block, own, streams, tokens, *extra,
            input_core_dims=[["dim"], [], [], *core],
            output_core_dims=[["dim"]],
            dask="parallelized",
            output_dtypes=[np.float64],
            kwargs={"draw": draw, "seed": seed},
        )
        for draw in range(draws)
    ]  # fmt: skip
    residual = xr.concat(redrawn, "draw")
    update = (lazy.tokenwise.astype(float) + residual).transpose("draw", *own.dims)
    result = measure(lazy.assign(update=update), usable, exclude=exclude, space=subspace)
    result = result.expand_dims(null=[name])
    result.attrs = {"seed": seed, "draws": int(draws)}
    return result.compute() if single else result


def _streams(own: xr.DataArray, seed: int) -> tuple[xr.DataArray, xr.DataArray]:
    """A number that tells (model, class, layer) apart whatever else is there, and token numbers."""
    codes = {}
    for dim in own.dims[:-2]:
        dim = str(dim)
        labels = own[dim].values if dim in own.coords else np.arange(own.sizes[dim])
        codes[dim] = xr.DataArray(
            [zlib.crc32(f"{dim}={label}".encode()) for label in labels], dims=dim
        )
    streams: Any = 0
    for code in codes.values():
        streams = (streams * 1_000_003 + code) % (1 << 31)
    tokens = xr.DataArray(np.arange(own.sizes["token"]), dims="token")
    chunks = {d: own.variable.chunksizes[d] for d in (*codes, "token")}
    streams = streams.transpose(*codes).chunk({d: chunks[d] for d in codes})
    return streams, tokens.chunk({"token": chunks["token"]})


def _pool(usable: xr.DataArray, seed: int) -> np.ndarray:
    everywhere = usable.all([d for d in usable.dims if d != "token"]).values
    pool = donor_pool(everywhere, np.random.default_rng([seed, 1]))
    if len(pool) < 2:
        raise ValueError(
            f"data: {int(everywhere.sum())} tokens are usable at all layers; exchanging needs two"
        )
    return pool


def _isotropic(
    own: np.ndarray, streams: np.ndarray, tokens: np.ndarray, *, draw: int, seed: int
) -> np.ndarray:
    dim = own.shape[-1]

    def directions(rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((BLOCK, dim))

    drawn = _by_block(own, streams, tokens, directions, draw, seed)
    return drawn * (norm(np.asarray(own, float)) / norm(drawn))[..., None]


def _exchanged(
    own: np.ndarray, streams: np.ndarray, tokens: np.ndarray, donors: np.ndarray,
    pool: np.ndarray, *, draw: int, seed: int,
) -> np.ndarray:  # fmt: skip
    size = len(pool := pool.reshape(-1, pool.shape[-1])[0])

    def numbers(rng: np.random.Generator) -> np.ndarray:
        first = rng.integers(size, size=BLOCK)
        return np.stack([first, rng.integers(1, size, size=BLOCK)], axis=1)

    chosen = _by_block(own, streams, tokens, numbers, draw, seed).astype(np.int64)
    itself = pool[chosen[..., 0]] == tokens.reshape(-1)
    choice = np.where(itself, chosen.sum(axis=-1) % size, chosen[..., 0])
    # donors come with the leading dims of ``own`` and a 1 for its tokens
    donors = np.asarray(donors, float)[..., 0, :, :]
    drawn = np.take_along_axis(donors, choice[..., None], axis=-2)
    length = norm(drawn)
    # a donor with no residual at all has no direction to lend: then nothing is changed
    scale = np.divide(norm(np.asarray(own, float)), length, out=np.zeros_like(length),
                      where=length > 0)  # fmt: skip
    return drawn * scale[..., None]


def _by_block(
    own: np.ndarray, streams: np.ndarray, tokens: np.ndarray,
    make: Callable[[np.random.Generator], np.ndarray], draw: int, seed: int,
) -> np.ndarray:  # fmt: skip
    """Random rows for every token of a chunk, from streams of whole blocks of tokens."""
    lead, tokens = own.shape[:-2], tokens.reshape(-1)
    codes = np.broadcast_to(streams.reshape(streams.shape[: len(lead)]), lead)
    first, last = int(tokens[0]), int(tokens[-1])
    rows = []
    for code in codes.reshape(-1):
        blocks = [
            make(np.random.default_rng([seed, draw, int(code), block]))
            for block in range(first // BLOCK, last // BLOCK + 1)
        ]
        rows.append(np.concatenate(blocks)[tokens - first // BLOCK * BLOCK])
    return np.stack(rows).reshape(*own.shape[:-1], -1)
