"""Which directions dominate the tokenwise parts of a layer's reference tokens, and those it misses?

Top-m right singular vectors per layer and function class, streamed over the reference tokens, each
of which is decomposed without itself; m/d of the energy of any vector falls into them by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.graph_manipulation import clone

from geomstats_lm import subspaces
from geomstats_lm.cube import settings_of, write_leaf
from geomstats_lm.decompose import decompose
from geomstats_lm.geometry import how_decomposed, usable_tokens

PARTS = ("tokenwise", "residual")
PASSES = 3  # refinements of a sketch, each decomposing the reference tokens once more

# variable -> its dims beyond (model, function_class, layer), dtype, long name
_FIELDS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "basis": (("component", "dim"), np.float32, "orthonormal basis of the dominant subspace"),
    "singular_values": (("component",), np.float64, "singular values of the rows"),
    "components": ((), np.int64, "dimensions of the dominant subspace"),
    "energy_share": ((), np.float64, "share of the reference energy in the subspace"),
    "effective_rank": ((), np.float64, "exponential of the entropy of the spectrum"),
    "participation_ratio": ((), np.float64, "squared sum over sum of squares of the spectrum"),
    "centre": (("dim",), np.float32, "mean row that was taken off"),
    "n": ((), np.int64, "reference tokens"),
}


def dominant_subspaces(
    data: xr.DataTree | xr.Dataset,
    m: int | float = 16,
    *,
    parts: Sequence[str] = PARTS,
    centred: bool = False,
    reference_tokens: int | None = 8192,
    most: int | None = None,
    method: str = "auto",
    model: Any = None,
    store: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Dominant subspaces of the tokenwise parts (and residuals) of reference tokens.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study with activations and decomposition: the reference tokens are
        decomposed as the evaluation tokens were, each without its own document.  Or what
        ``decompose(..., tokens="reference")`` returned.
    m : int or float
        Dimensions, or the share of energy in (0, 1) that the fewest dimensions must hold.
    parts : sequence of {"tokenwise", "residual"}
    centred : bool
        Take the reference mean off first.
    reference_tokens : int, optional
        About how many reference tokens to use, in whole chunks spread over all of them.
    most : int, optional
        Upper limit of dimensions; m itself, or min(d, 64) for a share of energy.
    method : {"auto", "gram", "sketch"}
        Memory of d x d numbers in one pass, or of (m + 16) x d in several; ``auto`` is the first
        up to d = 2048.
    model : LanguageModel, optional
        For the class ``self_only``.
    store, overwrite, progress
        As in ``write_leaf``; the leaf is ``subspace``.

    Returns
    -------
    xarray.Dataset
        Lazy.  For each part ``<part>_basis`` (model, function_class, layer, component, dim), rows
        of zeros beyond ``<part>_components``; ``<part>_singular_values``,
        ``<part>_energy_share``, ``<part>_effective_rank``, ``<part>_participation_ratio``,
        ``<part>_centre`` (..., dim) and ``<part>_n``.

    Raises
    ------
    ValueError
        If the tokens are evaluation tokens, whose own subspace they would lie in by construction.

    Examples
    --------
    >>> dims = ("model", "function_class", "layer", "token", "dim")
    >>> rows = np.diag([3.0, 2.0, 1.0])[None, None, None]
    >>> labels = {"function_class": ["affine"], "layer": [1], "split": ("token", [0, 0, 0])}
    >>> reference = xr.Dataset({"tokenwise": (dims, rows), "update": (dims, rows)}, labels)
    >>> space = dominant_subspaces(reference.assign(update=reference["update"][:, 0]), 1,
    ...     parts=["tokenwise"])
    >>> space.tokenwise_basis.values.ravel(), space.tokenwise_energy_share.values.round(3).ravel()
    (array([1., 0., 0.], dtype=float32), array([0.643]))
    """
    share, largest = subspaces.check_size(m, most)
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise ValueError(f"parts={list(parts)}: accepted are {PARTS}")
    if method not in ("auto", "gram", "sketch"):
        raise ValueError(f"method={method!r}: accepted are 'auto', 'gram', 'sketch'")
    reference = _reference_parts(data, parts, model)
    largest = min(largest, reference.sizes["dim"])
    gram = method == "gram" or (method == "auto" and reference.sizes["dim"] <= subspaces.GRAM_DIMS)
    how = {"share": share, "most": largest, "centred": centred, "gram": gram}
    runs = _chosen_runs(reference, reference_tokens)
    # what is not usable is dropped before rows are added
    usable = usable_tokens(reference).chunk({"token": reference.chunksizes["token"], "layer": 1})
    masks = usable.data.to_delayed()[0]
    variables: dict[str, Any] = {}
    for part in parts:
        variables |= _part_variables(reference, part, masks, runs, how)
    coords = {n: c for n, c in reference.coords.items() if "token" not in c.dims}
    attrs = {n: v for n, v in reference.attrs.items() if n != "settings"}
    result = xr.Dataset(variables, coords, {**attrs, "centred": int(centred), "m": m})
    if store is None:
        return result
    settings = {
        "m": m, "most": largest, "parts": list(parts), "centred": centred, "method": method,
        "reference_tokens": reference_tokens, "decomposition": settings_of(_decomposition(data)),
    }  # fmt: skip
    return write_leaf(
        result, store, str(result.model.values[0]), "subspace", settings=settings,
        overwrite=overwrite, progress=progress,
    )  # fmt: skip


def subspace_relations(subspaces_of: xr.Dataset) -> xr.Dataset:
    """How dominant subspaces are placed to one another, beside what chance gives.

    Parameters
    ----------
    subspaces_of : xarray.Dataset
        From :func:`dominant_subspaces`.

    Returns
    -------
    xarray.Dataset
        Principal angles in degrees, smallest first, NaN beyond the smaller space's dimensions:
        ``angles_residual`` between tokenwise part and residual (model, function_class, layer,
        component), ``angles_previous_layer`` between the tokenwise spaces of a layer and the one
        before, ``angles_classes`` between function classes (model, function_class, other_class,
        layer, component).  For each ``overlap_*``, the mean squared cosine, and ``chance_*``, its
        value for a random subspace, max(m_a, m_b) / d.

    Examples
    --------
    >>> eye = np.eye(3)[None, None, None, :1]
    >>> basis = xr.DataArray(eye, dims=("model", "function_class", "layer", "component", "dim"))
    >>> same = xr.Dataset({"tokenwise_basis": basis, "residual_basis": basis})
    >>> subspace_relations(same).overlap_residual.item()
    1.0
    """
    own = subspaces_of["tokenwise_basis"].load()
    before = own.shift(layer=1, fill_value=0.0)
    if "layer" in own.coords:  # a gap in the layers has no layer before
        gap = own.layer.diff("layer") > 1
        before = before.where(~gap.reindex(layer=own.layer, fill_value=False), 0.0)
    pairs = {"previous_layer": (own, before)}
    if "function_class" in own.coords:
        pairs["classes"] = own, own.rename(function_class="other_class")
    if "residual_basis" in subspaces_of:
        pairs["residual"] = own, subspaces_of["residual_basis"].load()
    result: dict[str, xr.DataArray] = {}
    for name, (a, b) in pairs.items():
        found = xr.apply_ufunc(
            _relation, a, b, input_core_dims=[["component", "dim"]] * 2,
            output_core_dims=[["component"], [], []], vectorize=True, join="exact",
            kwargs={"components": own.sizes["component"]},
        )  # fmt: skip
        for kind, values in zip(("angles", "overlap", "chance"), found):
            dims = ("model", "function_class", "other_class", "layer", "component")
            result[f"{kind}_{name}"] = values.transpose(*(d for d in dims if d in values.dims))
        result[f"angles_{name}"].attrs = {"units": "degree", "long_name": "principal angles"}
    return xr.Dataset(result)


def _relation(a: np.ndarray, b: np.ndarray, components: int) -> tuple[np.ndarray, float, float]:
    angles = np.full(components, np.nan)
    found = subspaces.principal_angles(a, b)
    angles[: len(found)] = found
    sizes = [int(np.any(basis != 0, axis=1).sum()) for basis in (a, b)]
    chance = max(sizes) / a.shape[1] if min(sizes) else np.nan
    return angles, subspaces.overlap(a, b), chance


def _decomposition(data: xr.DataTree | xr.Dataset) -> xr.Dataset:
    return data["decomposition"].to_dataset() if isinstance(data, xr.DataTree) else data


def _reference_parts(
    data: xr.DataTree | xr.Dataset, parts: Sequence[str], model: Any
) -> xr.Dataset:
    """The reference tokens' parts, dask-backed, one layer and class a chunk."""
    if isinstance(data, xr.DataTree):
        missing = [n for n in ("activations", "decomposition") if n not in data.children]
        if missing:
            raise ValueError(
                f"data: node {data.path} has no {' and no '.join(missing)}; the dominant subspace "
                "comes from reference tokens, which are decomposed as the evaluation tokens were"
            )
        data = decompose(
            data, **how_decomposed(data["decomposition"].to_dataset()), tokens="reference",
            keep=parts, model=model,
        )  # fmt: skip
    named = data.attrs.get("tokens")
    if named != "reference" and not ("split" in data.coords and not data["split"].any()):
        raise ValueError(
            "data: a subspace of the tokens it is to be judged on would hold them by construction; "
            "give a model's node with activations, or decompose(..., tokens='reference')"
        )
    absent = [part for part in parts if part not in data]
    if absent:
        raise ValueError(f"data: variables {absent} are missing; there are {list(data)}")
    first = data[parts[0]]
    run = first.chunksizes["token"] if first.chunks else min(first.sizes["token"], 4096)
    return data.chunk({"function_class": 1, "layer": 1, "dim": -1, "token": run})


def _chosen_runs(reference: xr.Dataset, wanted: int | None) -> list[int]:
    """Chunks along token that make up about as many tokens as wanted, evenly spread."""
    sizes = reference.chunksizes["token"]
    if wanted is None or wanted >= sum(sizes):
        return list(range(len(sizes)))
    if wanted < 1:
        raise ValueError(f"reference_tokens={wanted}: accepted are None and integers >= 1")
    number = max(1, round(wanted / (sum(sizes) / len(sizes))))
    return sorted({int(i) for i in np.linspace(0, len(sizes) - 1, number).round()})


def _part_variables(
    reference: xr.Dataset, part: str, masks: Any, runs: list[int], how: dict[str, Any]
) -> dict[str, Any]:
    blocks = reference[part].data.to_delayed()[0, :, :, :, 0]
    sizes = {"component": how["most"], "dim": reference.sizes["dim"]}
    found = [
        [
            _layer_subspace([(blocks[c, i, r], masks[i, r]) for r in runs], sizes["dim"], how)
            for i in range(blocks.shape[1])
        ]
        for c in range(blocks.shape[0])
    ]
    result = {}
    for name, (dims, dtype, text) in _FIELDS.items():
        shape = tuple(sizes[d] for d in dims)
        layers = [
            [
                da.from_delayed(_field(space, name), shape, dtype=dtype)[None, None, None]
                for space in row
            ]
            for row in found
        ]
        stacked = da.concatenate([da.concatenate(row, axis=2) for row in layers], axis=1)
        dims = ("model", "function_class", "layer", *dims)
        result[f"{part}_{name}"] = dims, stacked, {"long_name": f"{part}: {text}"}
    return result


def _layer_subspace(runs: list[tuple[Any, Any]], dim: int, how: dict[str, Any]) -> Any:
    """The delayed subspace of one layer and class: one chain of small tasks."""
    most, centred = how["most"], how["centred"]
    start = subspaces.empty_moments(dim) if how["gram"] else subspaces.empty_sketch(dim)
    seen: Any = start
    for block, mask in runs:
        seen = _add(seen, block, mask, most + subspaces.OVERSAMPLE)
    if how["gram"]:
        return dask.delayed(subspaces.from_moments)(seen, how["share"], most, centred=centred)
    directions = dask.delayed(subspaces.start_directions)(seen, centred=centred)
    for number in range(PASSES + 1):
        images: Any = 0.0
        # A block that two passes share would be held in memory between them: it is made anew.
        for block, mask in clone(*runs, seed=number):
            images = _image(images, block, mask, directions)
        if centred:
            images = dask.delayed(subspaces.less_mean)(seen, images, directions)
        if number < PASSES:
            directions = dask.delayed(subspaces.refine)(images, directions, most)
    return dask.delayed(subspaces.from_images)(
        seen, images, directions, how["share"], most, centred=centred
    )


@dask.delayed
def _add(seen: Any, block: np.ndarray, mask: np.ndarray, keep: int) -> Any:
    return subspaces.add_rows(seen, _flat(block)[mask.ravel()], keep)


@dask.delayed
def _image(images: Any, block: np.ndarray, mask: np.ndarray, directions: np.ndarray) -> Any:
    return images + subspaces.image(_flat(block)[mask.ravel()], directions)


@dask.delayed
def _field(space: subspaces.Subspace, name: str) -> np.ndarray:
    return np.asarray(getattr(space, name), dtype=_FIELDS[name][1])


def _flat(block: np.ndarray) -> np.ndarray:
    return block.reshape(-1, block.shape[-1])
