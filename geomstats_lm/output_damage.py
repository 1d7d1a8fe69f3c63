"""What happens to the output of some windows when their layers are patched, one by one?

``damage(l, v) = measure(head(final clean), head(final with h_l - v))`` for every layer l and
variant v: the replacements, and the controls at the norm of what each replacement takes off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from geomstats_lm.blocks import LanguageModel, apply_head, capture_final, resume_final
from geomstats_lm.controls import control_vectors, rescaled
from geomstats_lm.divergence import (
    OUTPUT_MEASURES,
    STATE_MEASURES,
    Clean,
    clean_output,
    compare_outputs,
    compare_states,
    take_rows,
)
from geomstats_lm.patching import patch_all, patch_downstream, patch_single
from geomstats_lm.replacements import Context, Replacement

HEAD_ELEMENTS = 1 << 22  # logits in memory at once: one block of rows, whatever the vocabulary
FINAL_BYTES = 1 << 27  # final states that wait for the head, so that clean logits are shared
VARIANTS_AT_ONCE = 8


class Ask(NamedTuple):
    """What is to be measured, the same for all windows."""

    layers: tuple[int, ...]
    rules: tuple[Replacement, ...]
    positions: tuple[str, ...]
    controls: tuple[str, ...]
    draws: int
    measures: tuple[str, ...]
    control_measures: tuple[str, ...]
    downstream: bool
    appends: bool
    batch_size: int
    seed: int
    model_has_head: bool


class Inputs(NamedTuple):
    """What some windows bring: their tokens are ``start, start + 1, …`` of the study."""

    ids: torch.Tensor  # (window, position)
    start: int
    residual: Callable[[int, int], np.ndarray]  # (class, layer index) -> (token, dim)
    donors: Callable[[int, int], np.ndarray]  # (class, layer index) -> (n, dim)
    pools: Sequence[np.ndarray]  # layer index -> (n,) tokens of the donors
    masks: Mapping[str, np.ndarray]  # way of patching -> bool (layer, token)
    n_classes: int


class _Job(NamedTuple):
    """Final states that wait to be compared with the clean ones, and where the answers go."""

    rows: np.ndarray
    final: torch.Tensor
    counted: np.ndarray | None  # which of the rows are wanted; all if None
    measures: tuple[str, ...]
    places: dict[str, np.ndarray]  # measure -> (token,) to fill in


def damage_of_windows(
    lm: LanguageModel, given: Inputs, ask: Ask, tick: Callable[[], Any]
) -> dict[str, np.ndarray]:
    """Measure the damage to the output of some windows.

    Parameters
    ----------
    lm : LanguageModel
    given : Inputs
    ask : Ask
    tick : callable
        Called after each layer and class.

    Returns
    -------
    dict of numpy.ndarray
        Measures, shape (1, class, replacement, positions, layer, token); ``<measure>_control``,
        shape (1, class, replacement, positions, control, draw, layer, token); ``downstream``,
        shape (1, class, replacement, layer, token); ``patched``, (1, positions, layer, token).
    """
    states, final = capture_final(lm, given.ids)
    out = _empty(given, ask)
    waiting = _Waiting(lm, final.reshape(-1, final.shape[-1]), next_tokens(given.ids))
    for index, c in itertools.product(range(len(ask.layers)), range(given.n_classes)):
        layer = ask.layers[index]
        for r, rule in enumerate(ask.rules):
            variants = _variants(given, ask, states, rule, index, c)
            for group in _grouped(variants, VARIANTS_AT_ONCE):
                for p, mode in enumerate(ask.positions):
                    mask = given.masks[mode][index]
                    places = [_places(out, ask, (0, c, r, p), v, index) for v, _ in group]
                    offs = [off for _, off in group]
                    given_to = (lm, given.ids, layer, states[layer], offs, mask)
                    _queue(waiting, mode, given_to, places, ask)
            if ask.downstream:
                off = next(iter(_variants(given, ask, states, rule, index, c)))[1]
                mask = given.masks["single"][index]
                if mask.any():
                    out["downstream"][0, c, r, index] = _downstream(
                        lm, given.ids, layer, states[layer], off, mask, waiting, ask.batch_size
                    )
        tick()
    waiting.flush()
    return out


def _empty(given: Inputs, ask: Ask) -> dict[str, np.ndarray]:
    n_tokens = given.ids.numel()
    head = (1, given.n_classes, len(ask.rules))
    tail = (len(ask.layers), n_tokens)
    out = {name: np.full((*head, len(ask.positions), *tail), np.nan) for name in ask.measures}
    for name in ask.control_measures:
        drawn = (len(ask.positions), len(ask.controls), ask.draws)
        out[f"{name}_control"] = np.full((*head, *drawn, *tail), np.nan)
    if ask.downstream:
        out["downstream"] = np.full((*head, *tail), np.nan)
    out["patched"] = np.stack([given.masks[mode] for mode in ask.positions])[None]
    return out


def _variants(
    given: Inputs,
    ask: Ask,
    states: Sequence[torch.Tensor],
    rule: Replacement,
    index: int,
    c: int,
) -> Iterator[tuple[tuple[int, int] | None, np.ndarray]]:
    """What is taken off, (token, dim): first by the rule itself (None), then by its controls."""
    layer, length = ask.layers[index], given.ids.shape[1]
    residual = np.asarray(given.residual(c, index), dtype=np.float64)
    donors, pool = given.donors(c, index), given.pools[index]
    off = np.empty_like(residual)
    windows = range(given.start, given.start + len(residual), length)
    for begin in windows:
        inside = slice(begin - given.start, begin - given.start + length)
        rng = np.random.default_rng([ask.seed, 3, layer, c, begin // length])
        context = Context(layer, donors, pool, begin, rng)
        before = update = residual[inside]
        if np.isnan(rule.factor):  # a dose reads the residual only
            before, after = (states[k].reshape(-1, residual.shape[1])[inside].double().cpu().numpy()
                             for k in (layer - 1, layer))  # fmt: skip
            update = after - before
        off[inside] = rule.takes_off(before, update, residual[inside], context)
    yield None, off
    for (k, control), draw in itertools.product(enumerate(ask.controls), range(ask.draws)):
        drawn = np.empty_like(off)
        for begin in windows:
            # seeded by the window, so that the draw does not depend on the batches; rules share it
            rng = np.random.default_rng([ask.seed, 2, layer, c, k, draw, begin // length])
            inside = slice(begin - given.start, begin - given.start + length)
            drawn[inside] = control_vectors(control, length, donors, pool, begin, rng)
        yield (k, draw), rescaled(drawn, off)


def _grouped(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


def _places(
    out: dict[str, np.ndarray],
    ask: Ask,
    at: tuple[int, ...],
    variant: tuple[int, int] | None,
    layer: int,
) -> dict[str, np.ndarray]:
    if variant is None:
        return {name: out[name][(*at, layer)] for name in ask.measures}
    return {n: out[f"{n}_control"][(*at, *variant, layer)] for n in ask.control_measures}


def _queue(
    waiting: _Waiting,
    mode: str,
    given_to: tuple[Any, ...],
    places: list[dict[str, np.ndarray]],
    ask: Ask,
) -> None:
    mask = given_to[-1]
    if not mask.any():
        return
    if mode == "all":
        rows, counted = np.arange(len(mask)), mask
        finals = patch_all(*given_to)
    else:
        rows, counted = np.flatnonzero(mask), None
        finals = patch_single(*given_to, appends=ask.appends, batch_size=ask.batch_size)
    for final, place in zip(finals, places):
        if place:
            waiting.add(_Job(rows, final, counted, tuple(place), place))


class _Waiting:
    """Final states kept until the head runs on a block of rows of all of them.

    The clean logits of a block are then computed once for many variants, and no more than one
    block of rows by the vocabulary is ever in memory.
    """

    def __init__(self, lm: LanguageModel, clean: torch.Tensor, target: torch.Tensor) -> None:
        self.lm, self.clean, self.target = lm, clean, target
        self.jobs: list[_Job] = []
        self.bytes = 0

    def add(self, job: _Job) -> None:
        states = [name for name in job.measures if name in STATE_MEASURES]
        if states:
            clean = self.clean[torch.from_numpy(job.rows).to(self.clean.device)]
            _store(job, slice(None), compare_states(clean, job.final, states))
        outputs = tuple(name for name in job.measures if name in OUTPUT_MEASURES)
        if outputs:
            self.jobs.append(job._replace(measures=outputs))
            self.bytes += job.final.nbytes
        if self.bytes > FINAL_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self.jobs:
            return
        for start, stop, clean in clean_blocks(self.lm, self.clean, self.target):
            loose = []
            for job in self.jobs:
                inside = slice(*np.searchsorted(job.rows, [start, stop]))
                if inside.stop - inside.start == stop - start:
                    # the clean block's own shape: what is not changed comes out exactly equal
                    logits = apply_head(self.lm, job.final[inside])
                    _store(job, inside, compare_outputs(clean, logits, job.measures))
                elif inside.stop > inside.start:
                    loose.append((job, inside))
            self._together(loose, start, stop - start, clean)
        self.jobs, self.bytes = [], 0

    def _together(
        self, loose: list[tuple[_Job, slice]], start: int, size: int, clean: Clean
    ) -> None:
        """Few rows of many jobs go through the head side by side."""
        for group in _few_rows(loose, size):
            final = torch.cat([job.final[inside] for job, inside in group])
            rows = np.concatenate([job.rows[inside] for job, inside in group]) - start
            measures = tuple(dict.fromkeys(n for job, _ in group for n in job.measures))
            kept = take_rows(clean, torch.from_numpy(rows))
            measured = compare_outputs(kept, apply_head(self.lm, final), measures)
            begin = 0
            for job, inside in group:
                end = begin + inside.stop - inside.start
                _store(job, inside, {n: measured[n][begin:end] for n in job.measures})
                begin = end


def _few_rows(loose: list[tuple[_Job, slice]], most: int) -> Iterator[list[tuple[_Job, slice]]]:
    group: list[tuple[_Job, slice]] = []
    n_rows = 0
    for job, inside in loose:
        size = inside.stop - inside.start
        if group and n_rows + size > most:
            yield group
            group, n_rows = [], 0
        group.append((job, inside))
        n_rows += size
    if group:
        yield group


def _store(job: _Job, inside: slice, measured: Mapping[str, torch.Tensor]) -> None:
    rows = job.rows[inside]
    wanted = slice(None) if job.counted is None else job.counted[inside]
    for name, values in measured.items():
        job.places[name][rows[wanted]] = values.cpu().numpy()[wanted]


def clean_blocks(
    lm: LanguageModel, final: torch.Tensor, target: torch.Tensor
) -> Iterator[tuple[int, int, Clean]]:
    """The clean output, a block of rows at a time."""
    step = max(1, HEAD_ELEMENTS // lm.vocabulary)
    for start in range(0, len(final), step):
        stop = min(start + step, len(final))
        yield start, stop, clean_output(apply_head(lm, final[start:stop]), target[start:stop])


def next_tokens(ids: torch.Tensor) -> torch.Tensor:
    """The token that follows each one in its window, -1 after the last: shape (token,)."""
    target = torch.full_like(ids, -1)
    target[:, :-1] = ids[:, 1:]
    return target.reshape(-1)


def _downstream(
    lm: LanguageModel,
    ids: torch.Tensor,
    layer: int,
    state: torch.Tensor,
    off: np.ndarray,
    mask: np.ndarray,
    waiting: _Waiting,
    batch_size: int,
) -> np.ndarray:
    """Mean damage at the later tokens of its window when one token is patched: (token,)."""
    length = ids.shape[1]
    total = np.full(len(mask), np.nan)
    for tokens, final in patch_downstream(
        lm, ids, layer, state, off, mask, batch_size=batch_size
    ):  # fmt: skip
        first = int(tokens[0]) // length * length
        later = np.arange(length)[None] > (tokens - first)[:, None]
        sums = np.zeros(len(tokens))
        clean, target = (v[first : first + length] for v in (waiting.clean, waiting.target))
        if lm.vocabulary:
            for start, stop, block in clean_blocks(lm, clean, target):
                for row in range(len(tokens)):
                    after = later[row, start:stop]
                    if after.any():
                        logits = apply_head(lm, final[row, start:stop])
                        kl = compare_outputs(block, logits, ("kl",))["kl"].cpu().numpy()
                        sums[row] += kl[after].sum()
        else:
            for row in range(len(tokens)):
                moved = compare_states(clean, final[row], ("state_distance",))["state_distance"]
                sums[row] = moved.cpu().numpy()[later[row]].sum()
        n_later = later.sum(axis=1)
        total[tokens] = np.divide(
            sums, n_later, out=np.full(len(tokens), np.nan), where=n_later > 0
        )
    return total


def replay_floors(
    lm: LanguageModel, ids: torch.Tensor, ask: Ask, measure: str
) -> tuple[float, dict[str, float]]:
    """What patching nothing does, in the same and in other batch shapes.

    Parameters
    ----------
    lm : LanguageModel
    ids : torch.Tensor, shape (window, position)
        The first windows.
    ask : Ask
    measure : str
        ``"kl"`` or ``"state_distance"``.

    Returns
    -------
    replay : float
        Largest difference of final states between the model and its replay from an unchanged
        ``h_l``, the batch of the same shape, over first, middle and last layer; 0 is exact.
    floors : dict of str to float
        For each way of patching, the largest damage measured with nothing taken off: windows run
        alone against in a batch (``"all"``), and the path of single positions (``"single"``).
    """
    states, final = capture_final(lm, ids)
    layers = sorted({1, (lm.n_layers + 1) // 2, lm.n_layers})
    replay = max(
        float((resume_final(lm, ids, layer, states[layer]) - final).abs().max()) for layer in layers
    )
    length = ids.shape[1]
    target, clean = next_tokens(ids[:1]), final[0]
    mask = np.zeros(length, dtype=bool)
    mask[1:] = True
    mask[0] = length == 1
    floors = {}
    for mode in ask.positions:
        worst = 0.0
        if mode == "all":
            alone = capture_final(lm, ids[:1])[1][0] if len(ids) > 1 else (
                capture_final(lm, ids.repeat(2, 1))[1][0]
            )  # fmt: skip
            worst = _largest(lm, clean, alone, target, np.arange(length), measure)
        else:
            nothing = [np.zeros((length, lm.dim))]
            for layer in layers:
                (same,) = patch_single(
                    lm, ids[:1], layer, states[layer][:1], nothing, mask, appends=ask.appends,
                    batch_size=ask.batch_size,
                )  # fmt: skip
                rows = np.flatnonzero(mask)
                worst = max(worst, _largest(lm, clean, same, target, rows, measure))
        floors[mode] = worst
    return replay, floors


def _largest(
    lm: LanguageModel,
    clean: torch.Tensor,
    final: torch.Tensor,
    target: torch.Tensor,
    rows: np.ndarray,
    measure: str,
) -> float:
    found = {measure: np.full(len(clean), np.nan)}
    waiting = _Waiting(lm, clean, target)
    waiting.add(_Job(rows, final, None, (measure,), found))
    waiting.flush()
    return float(np.nanmax(found[measure]))
