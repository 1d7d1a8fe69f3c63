"""Is a study's store what it should be?

The schema, in the words of which every finding is put:

A store is one Zarr v3 group, ``/<model key>/<leaf>`` with leaf ``activations``, ``decomposition``,
``geometry`` or ``perturbation``, and ``/statistics/<name>``; groups that hold leaves hold nothing
else.  Every leaf opens alone: it has its own coordinates and attributes, among them ``settings``,
the JSON of what made it.

dims
    Each variable has the dims it needs, in the order ``model, function_class, positions, control,
    draw, layer, token, dim``.  ``model`` has length 1 inside a model's group.
coordinates
    ``model`` (str, the key), ``layer`` (int, ascending, 0..L for states and 1..L for updates; a
    part of them where a part was kept), ``depth`` (layer / L), ``token`` (int, ascending), and on
    token ``document``, ``sequence``, ``position``, ``token_id``, ``char_start``, ``char_end``
    (int), ``split`` (0 reference, 1 evaluation) and ``is_special`` (bool).
variables
    ``activations``: ``hidden`` (model, layer, token, dim) and ``loss`` (model, token), absent where
    the model predicts no next token.  ``decomposition``: ``state`` and ``update`` (model, layer,
    token, dim), ``tokenwise`` and ``residual`` (model, function_class, layer, token, dim).  Floats
    are float32, float16, or bfloat16 kept as uint16 with ``storage_dtype: bfloat16``; float64 in
    tables.
chunks
    Of what has layer, token and dim: one layer, one function class, all of dim, a run of tokens
    that is the same for all variables of a leaf; uncompressed.
ledger
    ``finished`` (layer_run, token_run): the CRC-32C of the stored bytes of each finished unit, its
    variables in alphabetical order; 0 where unfinished.  Attributes ``unit_layers`` and
    ``unit_tokens`` say how many layers and tokens a unit spans; one token run more than there are
    runs of tokens holds what needs all tokens.  Every chunk of a finished unit is present.
root
    Its consolidated metadata lists the finished leaves, and no others.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from geomstats_lm.cube import DIM_ORDER, LEAVES, RESERVED
from geomstats_lm.encoding import checksum, continued_as, from_bfloat16
from geomstats_lm.ledger import token_runs, unit_region
from geomstats_lm.storage import (
    LEDGER,
    consolidated,
    list_keys,
    open_group,
    open_zarr_store,
    read_json,
)

TOKEN_LABELS = {
    "token": "iu", "document": "iu", "sequence": "iu", "position": "iu", "token_id": "iu",
    "char_start": "iu", "char_end": "iu", "split": "iu", "is_special": "b",
}  # fmt: skip
REQUIRED: dict[str, dict[str, tuple[str, ...]]] = {
    "activations": {"hidden": ("model", "layer", "token", "dim")},
    "decomposition": {
        "update": ("model", "layer", "token", "dim"),
        "residual": ("model", "function_class", "layer", "token", "dim"),
    },
    "geometry": {},
    "perturbation": {},
}
# Variables in which a layer of zeros or a value that is not finite is a fault, not an answer
STATES = ("hidden", "mixer", "mlp", "state", "update")
FLOATS = ("float16", "float32", "float64")
AGAIN = "run the same command again: it carries on"
MODEL = "look at the model: does it run in float32, are its weights those it was trained to?"
ANEW = "copy the store again from where it was made, or run the step with overwrite=True"

Finding = tuple[str, str, str, str]  # variable, check, what is wrong, what to do


def verify_study(
    store: str | Path, *, sample: int | None = 4, seed: int = 0, quiet: bool = False
) -> pd.DataFrame:
    """Check a study against the schema, its ledgers and its checksums.

    Parameters
    ----------
    store : str or Path
        Folder or fsspec URL of the Zarr store.
    sample : int, optional
        Units of every layer run whose values are read and checked, drawn at random; None reads
        everything.
    seed : int
        Of the sample.
    quiet : bool
        Print nothing.

    Returns
    -------
    pandas.DataFrame
        One row a finding, with columns ``leaf``, ``variable``, ``check``, ``problem``, ``advice``;
        no rows where all is well.  ``attrs`` hold how many leaves, units and values were checked.

    Raises
    ------
    FileNotFoundError
        If there is no study at ``store``.

    Examples
    --------
    >>> import tempfile, xarray as xr
    >>> from geomstats_lm.cube import write_leaf
    >>> store = tempfile.mkdtemp() + "/study.zarr"
    >>> table = xr.Dataset({"estimate": ("name", [0.5])}, {"name": ["rho"]})
    >>> _ = write_leaf(table, store, "statistics", "rho", settings={}, progress=False)
    >>> len(verify_study(store))
    1 leaf, 1 unit, 1 of them read: nothing wrong
    0
    """
    if sample is not None and sample < 1:
        raise ValueError(f"sample={sample}: accepted are 1, 2, ... and None for everything")
    rows: list[tuple[str, ...]] = []
    counts = {"n_leaves": 0, "n_units": 0, "n_units_read": 0}
    for key, group in sorted(open_group(store).groups()):
        for name, _ in group.arrays():
            rows.append((key, name, "place", "an array beside the leaves", "move it into a leaf"))
        for name, node in sorted(group.groups()):
            path = f"{key}/{name}"
            counts["n_leaves"] += 1
            if LEDGER not in node:
                rows.append((path, "", "ledger", "it was never set up completely", AGAIN))
                continue
            leaf = _read_leaf(node)
            draws = np.random.default_rng([seed, zlib.crc32(path.encode())])
            rows.extend((path, *finding) for finding in _check_leaf(store, key, name, leaf))
            rows.extend((path, *finding) for finding in _check_values(leaf, sample, draws))
            counts["n_units"] += leaf.ledger.size
            counts["n_units_read"] += leaf.n_read
    rows.extend(("", *finding) for finding in _check_root(store))
    frame = pd.DataFrame(rows, columns=["leaf", "variable", "check", "problem", "advice"])
    frame.attrs.update(counts)
    if not quiet:
        print(describe(frame))
    return frame


def describe(findings: pd.DataFrame) -> str:
    """Findings of :func:`verify_study` as lines for people."""
    counts = findings.attrs
    numbers = [
        f"{counts[f'n_{what}']} {one if counts[f'n_{what}'] == 1 else what}"
        for one, what in (("leaf", "leaves"), ("unit", "units"))
    ]
    head = f"{', '.join(numbers)}, {counts['n_units_read']} of them read: "
    if findings.empty:
        return head + "nothing wrong"
    lines = [f"{head}{len(findings)} {'finding' if len(findings) == 1 else 'findings'}"]
    for leaf, variable, check, problem, advice in findings.to_numpy(dtype=object):
        place = "/".join(p for p in (leaf, variable) if p) or "the root"
        lines.append(f"  {place} [{check}] {problem}\n      -> {advice}")
    return "\n".join(lines)


@dataclass
class Leaf:
    """What verify needs to know of a leaf: its arrays, its units, its ledger."""

    group: Any
    arrays: dict[str, Any]
    dims: dict[str, tuple[str, ...]]
    labels: set[str]
    in_units: list[str]
    ledger: np.ndarray
    unit: dict[str, int]
    grid: dict[str, list[tuple[int, int]]]
    has_last_run: bool
    n_read: int = 0


def _read_leaf(group: Any) -> Leaf:
    arrays = {n: a for n, a in group.arrays() if n != LEDGER}
    dims = {n: tuple(a.metadata.dimension_names or ()) for n, a in arrays.items()}
    named = {
        name
        for holder in (group, *arrays.values())
        for name in str(holder.attrs.get("coordinates", "")).split()
    }
    labels = {n for n in arrays if n in named or dims[n] == (n,)}
    data = [n for n in arrays if n not in labels]
    # what came chunk by chunk is not compressed; a small table came whole, and is one unit
    in_units = [n for n in data if not arrays[n].compressors] or data
    ledger = group[LEDGER]
    unit = {d: max(1, int(ledger.attrs.get(f"unit_{d}s", 1))) for d in ("layer", "token")}
    grid = {}
    for dim in unit:
        sizes = [arrays[n].shape[dims[n].index(dim)] for n in in_units if dim in dims[n]]
        grid[dim] = token_runs(sizes[0] if sizes else 1, unit[dim])
    has_last_run = ledger.shape[1] == len(grid["token"]) + 1
    if has_last_run:
        end = grid["token"][-1][1]
        grid["token"].append((end, end))
    return Leaf(
        group, arrays, dims, labels, in_units, np.asarray(ledger[...]), unit, grid, has_last_run
    )


def _check_leaf(store: str | Path, key: str, name: str, leaf: Leaf) -> Iterator[Finding]:
    # perturb() keeps further perturbations under names of their own; they all say what they patched
    if key != RESERVED and name not in LEAVES and "patched" not in leaf.arrays:
        yield "", "place", f"{name!r} is none of {', '.join(LEAVES)}", "remove or rename it"
    try:
        json.loads(leaf.group.attrs["settings"])
    except (KeyError, ValueError):
        yield "", "attributes", "its settings are missing or no JSON", ANEW
    yield from _check_chunks(store, f"{key}/{name}", leaf)
    if key == RESERVED:
        return
    yield from _check_labels(key, leaf)
    for variable, expected in REQUIRED.get(name, {}).items():
        if variable not in leaf.arrays:
            yield variable, "schema", f"{name} has no {variable!r}", ANEW
        elif leaf.dims[variable] != expected:
            yield variable, "dims", f"{leaf.dims[variable]} is not {expected}", ANEW
    runs = {}
    for variable in leaf.in_units:
        array, names = leaf.arrays[variable], leaf.dims[variable]
        yield from _check_shape(variable, array, names)
        if "token" in names:
            runs[variable] = array.chunks[names.index("token")]
    if len(set(runs.values())) > 1:
        yield "", "chunks", f"variables differ in tokens a chunk: {runs}", ANEW


def _check_shape(variable: str, array: Any, names: tuple[str, ...]) -> Iterator[Finding]:
    ordered = tuple(d for d in DIM_ORDER if d in names)
    if names[: len(ordered)] != ordered and set(names) <= set(DIM_ORDER):
        yield variable, "dims", f"{names} is not in the order {ordered}", ANEW
    if "model" in names and array.shape[names.index("model")] != 1:
        yield variable, "dims", "model has not length 1 inside a model's group", ANEW
    dtype, stored = str(array.dtype), array.attrs.get("storage_dtype")
    if array.dtype.kind == "f" and dtype not in FLOATS:
        yield variable, "dtype", f"{dtype} is none of {', '.join(FLOATS)}", ANEW
    if stored == "bfloat16" and dtype != "uint16":
        yield variable, "dtype", f"bfloat16 is kept as uint16, not {dtype}", ANEW
    if {"layer", "token", "dim"} <= set(names):
        sizes = dict(zip(names, zip(array.chunks, array.shape)))
        wrong = [d for d in names if d in ("layer", "function_class") and sizes[d][0] != 1]
        wrong += ["dim"] if sizes["dim"][0] < sizes["dim"][1] else []
        if wrong:
            found = {d: sizes[d][0] for d in wrong}
            yield variable, "chunks", f"{found}: a chunk is one layer and all of dim", ANEW


def _check_labels(key: str, leaf: Leaf) -> Iterator[Finding]:
    arrays, attrs = leaf.arrays, leaf.group.attrs
    used = {d for n in leaf.in_units for d in leaf.dims[n]}
    needed = ["model", *(["layer", "depth"] if "layer" in used else [])]
    needed += TOKEN_LABELS if "token" in used else []
    for name in needed:
        if name not in arrays:
            yield name, "labels", "the coordinate is missing", ANEW
    values = {n: np.asarray(arrays[n][...]) for n in needed if n in arrays}
    if "model" in values and values["model"].ravel().tolist() != [key]:
        yield "model", "labels", f"{values['model'].tolist()} is not the key {key!r}", ANEW
    for name, kinds in {"layer": "iu", **TOKEN_LABELS}.items():
        if name not in values:
            continue
        dim = "layer" if name == "layer" else "token"
        if leaf.dims[name] != (dim,) or values[name].dtype.kind not in kinds:
            yield name, "labels", f"{values[name].dtype} on {leaf.dims[name]}", ANEW
        elif name in ("layer", "token") and (np.diff(values[name]) <= 0).any():
            yield name, "labels", "its numbers do not ascend", ANEW
        elif name in ("layer", "token", "position") and (values[name] < 0).any():
            yield name, "labels", "some of its numbers are negative", ANEW
        elif name == "split" and not np.isin(values[name], (0, 1)).all():
            yield name, "labels", "it is 0 for reference and 1 for evaluation, nothing else", ANEW
    if (
        {"layer", "depth"} <= set(values)
        and attrs.get("n_layers")
        and not np.allclose(values["depth"], values["layer"] / attrs["n_layers"])
    ):
        yield "depth", "labels", "it is not layer / n_layers", ANEW


def _check_chunks(store: str | Path, path: str, leaf: Leaf) -> Iterator[Finding]:
    """The ledger against the files that are there."""
    present: dict[str, set[str]] = {}
    for key in list_keys(open_zarr_store(store, read_only=True), path):
        name, _, chunk = key.partition("/")
        if key.endswith(".partial"):
            yield name, "files", f"{key} was half written by a killed writer", "remove it"
        elif name in leaf.arrays and chunk != "zarr.json":
            present.setdefault(name, set()).add(chunk)
        elif name not in leaf.arrays and name != LEDGER and key != "zarr.json":
            yield name, "files", f"{key} belongs to no variable", "remove it"
    finished = leaf.ledger > 0
    unfinished = int((~finished).sum())
    if unfinished:
        yield LEDGER, "ledger", f"{unfinished} of {finished.size} units are not finished", AGAIN
    for name in leaf.arrays:
        chunks = dict(_chunk_units(leaf, name))
        there = present.get(name, set())
        missing = {key for key, unit in chunks.items() if finished[unit] and key not in there}
        if name in leaf.labels:
            missing = set(chunks) - there
        if missing:
            problem = f"{len(missing)} finished chunks are missing: {_some(missing)}"
            yield name, "chunks", problem, ANEW
        if there - set(chunks):
            extra = there - set(chunks)
            yield name, "files", f"{len(extra)} files are no chunks: {_some(extra)}", "remove them"


def _chunk_units(leaf: Leaf, name: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name of every chunk of a variable, and the unit that holds it."""
    array, names = leaf.arrays[name], leaf.dims[name]
    for index in np.ndindex(*(-(-s // c) for s, c in zip(array.shape, array.chunks))):
        start = {d: i * c for d, i, c in zip(names, index, array.chunks)}
        column = start.get("token", 0) // leaf.unit["token"]
        if leaf.has_last_run and "token" not in names:
            column = leaf.ledger.shape[1] - 1
        unit = (start.get("layer", 0) // leaf.unit["layer"], column)
        yield "/".join(["c", *map(str, index)]), unit if name not in leaf.labels else (0, 0)


def _check_values(leaf: Leaf, sample: int | None, rng: np.random.Generator) -> list[Finding]:
    """Read a sample of the finished units: do checksums hold, are states finite and not zero?"""
    if (len(leaf.grid["layer"]), len(leaf.grid["token"])) != leaf.ledger.shape:
        cut = f"{len(leaf.grid['layer'])} x {len(leaf.grid['token'])}"
        return [(LEDGER, "ledger", f"{leaf.ledger.shape} units, but chunks make {cut}", ANEW)]
    extend = continued_as(str(leaf.group[LEDGER].attrs.get("long_name", "")))
    broken: list[tuple[int, int]] = []
    unreadable: list[tuple[tuple[int, int], str]] = []
    faults: dict[tuple[str, str, int], list[bool]] = {}
    for row in range(len(leaf.ledger)):
        done = np.flatnonzero(leaf.ledger[row])
        if sample is not None and len(done) > sample:
            done = np.sort(rng.choice(done, sample, replace=False))
        for column in done:
            unit = (row, int(column))
            leaf.n_read += 1
            try:
                parts = _read_unit(leaf, unit)
            except (ValueError, OSError, RuntimeError) as error:  # a chunk cut short, a bad disk
                unreadable.append((unit, str(error)))
                continue
            if checksum(parts, extend) != leaf.ledger[unit]:
                broken.append(unit)
            for name in set(STATES) & set(parts):
                for layer, values in _by_layer(leaf, name, parts[name], row):
                    faults.setdefault((name, "not finite", layer), []).append(
                        not np.isfinite(values).all()
                    )
                    faults.setdefault((name, "all zero", layer), []).append(not values.any())
    findings: list[Finding] = []
    if unreadable:
        units = _some(unit for unit, _ in unreadable)
        problem = f"{len(unreadable)} of {leaf.n_read} units cannot be read: {units}; "
        findings.append(("", "checksum", problem + unreadable[0][1], ANEW))
    if broken:
        problem = (
            f"stored bytes of {len(broken)} of {leaf.n_read} units read are not those that were "
            f"written: (layer run, token run) {_some(broken)}"
        )
        findings.append(("", "checksum", problem, ANEW))
    for name in STATES:
        for fault, enough in (("not finite", any), ("all zero", all)):
            layers = sorted(
                number for (n, f, number), seen in faults.items() if (n, f) == (name, fault)
                and enough(seen)
            )  # fmt: skip
            if layers:
                findings.append((name, "values", f"{fault} in layers {layers}", MODEL))
    return findings


def _read_unit(leaf: Leaf, unit: tuple[int, int]) -> dict[str, np.ndarray]:
    parts = {}
    for name in leaf.in_units:
        dims, at = leaf.dims[name], unit
        if leaf.has_last_run:
            if ("token" in dims) == (unit[1] == len(leaf.grid["token"]) - 1):
                continue
            at = unit if "token" in dims else (unit[0], 0)
        region = unit_region(dims, leaf.grid, at)
        if region is not None:
            parts[name] = np.asarray(leaf.arrays[name][region])
    return parts


def _by_layer(
    leaf: Leaf, name: str, values: np.ndarray, row: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(layer number, its float values) of a unit's part of a variable."""
    if leaf.arrays[name].attrs.get("storage_dtype") == "bfloat16":
        values = from_bfloat16(values)
    numbers = np.asarray(leaf.arrays["layer"][slice(*leaf.grid["layer"][row])])
    axis = leaf.dims[name].index("layer")
    for place, number in enumerate(numbers):
        yield int(number), np.take(values, place, axis=axis)


def _check_root(store: str | Path) -> Iterator[Finding]:
    root = read_json(open_zarr_store(store, read_only=True), "zarr.json")
    if root.get("consolidated_metadata") != consolidated(store):
        yield (
            "", "root", "its list of finished leaves is out of date, so that readers without this "
            "package miss some", "run geomstats_lm.storage.publish(store)",
        )  # fmt: skip


def _some(things: Iterable[Any]) -> str:
    found = sorted(things)
    return ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
