"""Which files hold a study, and which of its leaves does a reader see?

``study = {group/leaf}``: a leaf is there for readers when its ledger counts as many finished units
as it has, and the root's consolidated metadata lists exactly the leaves that are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LEDGER = "finished"
EMPTY_GROUP = {"attributes": {}, "zarr_format": 3, "node_type": "group"}


class IncompleteError(ValueError):
    """A leaf of the study has unfinished chunks; the same command that began it carries on."""


def open_zarr_store(store: str | Path, *, read_only: bool = False) -> Any:
    """Zarr's store for a folder or an fsspec URL."""
    from zarr.storage import FsspecStore, LocalStore

    if "://" in str(store):
        return FsspecStore.from_url(str(store), read_only=read_only)
    return LocalStore(str(store), read_only=read_only)


def open_group(store: str | Path, path: str = "", *, mode: Any = "r") -> Any:
    """A group of the store, its metadata read from its own files and never from a copy.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    """
    import zarr

    try:
        return zarr.open_group(
            open_zarr_store(store, read_only=mode == "r"), path=path, mode=mode, zarr_format=3,
            use_consolidated=False,
        )  # fmt: skip
    except (FileNotFoundError, NotADirectoryError):
        place = f"{store}/{path}" if path else str(store)
        raise FileNotFoundError(f"no study data at {place}") from None


def list_leaves(store: str | Path) -> list[str]:
    """Paths ``<group>/<leaf>`` of the leaves in a store, in alphabetical order.

    Raises
    ------
    FileNotFoundError
        If there is no study at ``store``.
    """
    root = open_group(store)
    return sorted(
        f"{key}/{name}"
        for key, group in root.groups()
        for name, leaf in group.groups()
        if LEDGER in leaf
    )


def unfinished_units(store: str | Path, path: str) -> tuple[int, int]:
    """How many units of a leaf are not finished, and how many there are."""
    ledger = open_group(store, path)[LEDGER]
    ticks = list_keys(open_zarr_store(store, read_only=True), f"{path}/{LEDGER}/c")
    return ledger.nchunks - sum(not k.endswith(".partial") for k in ticks), ledger.nchunks


def missing_chunks(store: str | Path, path: str) -> dict[str, int]:
    """Variables of a leaf that lack chunks, and how many chunks they lack."""
    present: dict[str, int] = {}
    for key in list_keys(open_zarr_store(store, read_only=True), path):
        name, _, chunk = key.partition("/")
        if (chunk == "c" or chunk.startswith("c/")) and not key.endswith(".partial"):
            present[name] = present.get(name, 0) + 1
    return {
        name: array.nchunks - present.get(name, 0)
        for name, array in open_group(store, path).arrays()
        if array.nchunks > present.get(name, 0)
    }


def publish(store: str | Path) -> None:
    """Make the root's consolidated metadata list the finished leaves, and no others.

    Readers without this package find the study through it.  No lock is needed: whoever wrote it
    looks again afterwards, so of several writers the last one sees what all the others did.
    """
    zarr_store = open_zarr_store(store)
    while True:
        root = read_json(zarr_store, "zarr.json") or dict(EMPTY_GROUP)
        wanted = consolidated(store)
        if root.get("consolidated_metadata") == wanted:
            return
        write_json(zarr_store, "zarr.json", {**root, "consolidated_metadata": wanted})


def consolidated(store: str | Path) -> dict[str, Any]:
    """The consolidated metadata that lists the finished leaves."""
    zarr_store = open_zarr_store(store, read_only=True)
    metadata: dict[str, Any] = {}
    for path in list_leaves(store):
        if unfinished_units(store, path)[0]:
            continue
        key = path.split("/")[0]
        names = sorted(name for name, _ in open_group(store, path).arrays())
        for node in (key, path, *(f"{path}/{name}" for name in names)):
            metadata[node] = read_json(zarr_store, f"{node}/zarr.json")
    return {"kind": "inline", "must_understand": False, "metadata": metadata}


def list_keys(zarr_store: Any, path: str) -> list[str]:
    """Names of the files below a path of the store, relative to it, in alphabetical order."""
    from zarr.core.sync import sync

    async def collect() -> list[str]:
        return [key async for key in zarr_store.list_prefix(f"{path}/" if path else "")]

    start = len(path) + 1 if path else 0
    return sorted(key[start:] for key in sync(collect()))


def write_file(zarr_store: Any, key: str, value: Any, *, if_absent: bool = False) -> None:
    """Write one file whole; with ``if_absent`` the first writer's stays."""
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    if isinstance(value, bytes):
        value = default_buffer_prototype().buffer.from_bytes(value)
    sync((zarr_store.set_if_not_exists if if_absent else zarr_store.set)(key, value))


def write_json(zarr_store: Any, key: str, value: Any, *, if_absent: bool = False) -> None:
    """Write one JSON file whole."""
    write_file(zarr_store, key, json.dumps(value, indent=2).encode(), if_absent=if_absent)


def read_json(zarr_store: Any, key: str) -> dict[str, Any]:
    """Contents of a JSON file, empty where there is none."""
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    value = sync(zarr_store.get(key, prototype=default_buffer_prototype()))
    return {} if value is None else json.loads(value.to_bytes())


def exists(zarr_store: Any, key: str) -> bool:
    """Whether a file is there."""
    from zarr.core.sync import sync

    return bool(sync(zarr_store.exists(key)))


def delete_file(zarr_store: Any, key: str) -> None:
    """Remove a file, if it is there."""
    from zarr.core.sync import sync

    sync(zarr_store.delete(key))


def delete_folder(zarr_store: Any, path: str) -> None:
    """Remove everything below a path."""
    from zarr.core.sync import sync

    sync(zarr_store.delete_dir(path))
