"""Which tasks make up a decomposition, and what does each wait for?

Per layer one task prepares the reference, per (layer, run of tokens) one task fits all classes;
``block of a variable = entry(fit(prepare(reference blocks), block of h_{l-1}, block of h_l))``.
All of it is one flat layer of a dask graph, since graphs of many layers cost more than the fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from geomstats_lm import layer_fits


class LayerGraph:
    """The tasks of a decomposition, from which each variable is taken as a dask array.

    Parameters
    ----------
    hidden : dask.array.Array, shape (1, layers, tokens, d)
        All states, one layer per chunk.
    queries : dask.array.Array, shape (1, layers, n, d)
        States of the tokens to decompose, in the chunks of the result.
    layers : mapping of layer to (index of h_{l-1}, index of h_l)
    plan : layer_fits.Plan
    reference_rows, median_rows, query_rows : numpy.ndarray of int
        Tokens that may be references, whose norms have the median, and to decompose.
    labels : mapping
        ``groups``, ``folds``, ``token_ids``, ``documents`` of all tokens.
    model : LanguageModel, optional
        Given to every run, where a class needs it.
    """

    def __init__(
        self,
        hidden: da.Array,
        queries: da.Array,
        layers: Mapping[int, tuple[int, int]],
        plan: layer_fits.Plan,
        *,
        reference_rows: np.ndarray,
        median_rows: np.ndarray,
        query_rows: np.ndarray,
        labels: Mapping[str, np.ndarray],
        model: Any = None,
    ) -> None:
        self.token_chunks = queries.chunks[2]
        self.sizes = {"dim": queries.shape[3], "function_class": len(plan.classes)}
        self.layers = list(layers)
        identity = tokenize(hidden.name, queries.name, layers, plan, reference_rows, labels)
        self.name = f"decompose-{identity}"
        tasks: dict[Any, Any] = {}
        tables = f"{self.name}-tables"
        tasks[tables] = (partial(_constant, {n: v[reference_rows] for n, v in labels.items()}),)
        extra: tuple[str, ...] = ()
        if model is not None:  # its own node, sent to a worker once
            extra = (f"{self.name}-model",)
            tasks[extra[0]] = (partial(_constant, model),)
        references = _block_rows(hidden.chunks[2], reference_rows)
        medians = _block_rows(hidden.chunks[2], median_rows)
        starts = np.concatenate([[0], np.cumsum(self.token_chunks)])
        for layer, ends in layers.items():
            for index in ends:
                for b, rows in medians.items():
                    key = (f"{self.name}-norms", index, b)
                    tasks[key] = (
                        partial(layer_fits.block_norms, rows),
                        (hidden.name, 0, index, b, 0),
                    )
                # A cap on references takes few rows of many chunks, whose rest must not wait in
                # memory until the last chunk is read.
                for b, rows in references.items():
                    key = (f"{self.name}-taken", index, b)
                    tasks[key] = (
                        partial(layer_fits.taken_rows, rows),
                        (hidden.name, 0, index, b, 0),
                    )
            tasks[self._prepare_key(layer)] = (
                partial(layer_fits.prepare, plan, layer),
                [(f"{self.name}-taken", ends[0], b) for b in references],
                [(f"{self.name}-taken", ends[1], b) for b in references],
                [(f"{self.name}-norms", ends[0], b) for b in medians],
                [(f"{self.name}-norms", ends[1], b) for b in medians],
                tables,
            )
            for r in range(len(self.token_chunks)):
                chosen = query_rows[starts[r] : starts[r + 1]]
                own = {name: values[chosen] for name, values in labels.items()}
                tasks[self._run_key(layer, r)] = (
                    partial(layer_fits.fit_run, plan, own),
                    self._prepare_key(layer),
                    (queries.name, 0, ends[0], r, 0),
                    (queries.name, 0, ends[1], r, 0),
                    *extra,
                )
        sources: list[Any] = [hidden, queries]
        self.graph = HighLevelGraph.from_collections(self.name, tasks, dependencies=sources)

    def array(self, name: str, dims: Sequence[str], dtype: Any) -> da.Array:
        """A variable of the decomposition as a dask array, one block per class and task."""
        key = f"{name}-{self.name}"
        by_class, by_token = "function_class" in dims, "token" in dims
        chunks = tuple(
            {
                "model": (1,),
                "function_class": (1,) * self.sizes["function_class"],
                "layer": (1,) * len(self.layers),
                "token": self.token_chunks,
                "dim": (self.sizes["dim"],),
            }[dim]
            for dim in dims
        )
        tail = (0,) if "dim" in dims else ()
        tasks: dict[Any, Any] = {}
        for i, layer in enumerate(self.layers):
            for c in range(self.sizes["function_class"]) if by_class else [None]:
                first = (0, i) if c is None else (0, c, i)
                take = partial(layer_fits.entry, name, c)
                if by_token:
                    for r in range(len(self.token_chunks)):
                        tasks[(key, *first, r, *tail)] = (take, self._run_key(layer, r))
                else:
                    tasks[(key, *first, *tail)] = (take, self._prepare_key(layer))
        graph = HighLevelGraph(
            {**self.graph.layers, key: tasks}, {**self.graph.dependencies, key: {self.name}}
        )
        return da.Array(graph, key, chunks, dtype=dtype)

    def _prepare_key(self, layer: int) -> tuple[str, int]:
        return (f"{self.name}-prepare", layer)

    def _run_key(self, layer: int, run: int) -> tuple[str, int, int]:
        return (self.name, layer, run)


def _constant(value: Any) -> Any:
    return value


def _block_rows(chunks: Sequence[int], rows: np.ndarray) -> dict[int, np.ndarray]:
    """Which rows of which chunk make up a sorted selection of rows."""
    starts = np.concatenate([[0], np.cumsum(chunks)])
    block = np.searchsorted(starts, rows, side="right") - 1
    return {int(b): rows[block == b] - starts[b] for b in np.unique(block)}
