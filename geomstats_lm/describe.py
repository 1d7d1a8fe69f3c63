"""What is a model made of, and which verbs does it support?

Its modules and configuration are read; the verbs are tried on one short random window. Of a name
or path only the configuration is read: ``h_l = block_l(h_{l-1})`` holds for any weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn

from geomstats_lm.blocks import (
    LanguageModel,
    UnsupportedModelError,
    appends_exactly,
    capture,
)
from geomstats_lm.contract import as_language_model, find_blocks, longest_window, text_config
from geomstats_lm.models import (
    auto_class,
    default_name,
    first_line,
    fresh_weights,
    load_tokenizer,
    read_config,
    source_of,
)

TRIED = 2_000_000_000  # parameters of a model that is built to try the verbs on it, at most


class Support(NamedTuple):
    """Whether a verb works (None: not tried), and how, or why not."""

    verb: str
    supported: bool | None
    how: str


@dataclass(frozen=True)
class ModelDescription:
    """What a model is made of and which verbs it supports; printed, it is a page.

    Attributes
    ----------
    facts : dict
        Name, architecture, shapes, dtype, device, names of modules.
    verbs : tuple of Support
        Verb, whether it is supported, and how or why not.
    """

    facts: dict[str, Any]
    verbs: tuple[Support, ...]

    def tidy(self) -> pd.DataFrame:
        """One row: the facts, and for each verb a column with its name and one ``<verb>_how``."""
        row = dict(self.facts)
        for verb in self.verbs:
            row[verb.verb], row[f"{verb.verb}_how"] = verb.supported, verb.how
        return pd.DataFrame([row])

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.facts, *(v.verb for v in self.verbs))) + 2
        lines = [f"{name:<{width}}{_shown(value)}" for name, value in self.facts.items()]
        words = {True: "yes", False: "no", None: "not tried"}
        lines += ["", "verbs"]
        lines += [
            f"{v.verb:<{width}}{words[v.supported]}{': ' if v.how else ''}{v.how}"
            for v in self.verbs
        ]
        return "\n".join(lines)

    __repr__ = __str__


def describe_model(
    model: LanguageModel | str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelDescription:
    """Describe a model: architecture, shapes, modules, and the verbs it supports.

    Parameters
    ----------
    model : LanguageModel, str or Path
        A loaded model; or a hub id, folder or GGUF file, of which the configuration and the
        tokenizer are read but no weights: the verbs are tried on fresh ones.
    revision : str, optional
        Revision on the hub.
    trust_remote_code : bool
        Whether code that comes with the model may run.

    Returns
    -------
    ModelDescription
        Printed, it is a page; ``tidy()`` is one row.

    Raises
    ------
    FileNotFoundError
        If the path, or a model of that name, cannot be found.
    UnsupportedModelError
        If no causal model can be made of the configuration.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_path
    >>> page = describe_model(example_path("gpt2"))
    >>> page.facts["mixer"], page.facts["mlp"], page.facts["final_norm"]
    ('attn', 'mlp', 'transformer.ln_f')
    >>> page.tidy()[["n_layers", "dim", "extract", "perturb_single"]].values.tolist()
    [[6, 192, True, True]]
    """
    if isinstance(model, LanguageModel):
        return _describe(model)
    source, where = source_of(model, revision, trust_remote_code)
    config = read_config(source, where)
    try:
        tokenizer = load_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
    except FileNotFoundError:
        tokenizer = None
    name, auto = default_name(model), auto_class(config, trust_remote_code)
    stored = str(getattr(config, "dtype", None) or "unknown").removeprefix("torch.")
    own = {"name": name, "dtype": stored, "device": "not loaded", "weights": "not read"}
    with torch.device("meta"):
        outline = fresh_weights(auto, config, torch.float32, 0, trust_remote_code)
    size = sum(p.numel() for p in outline.parameters())
    if size > TRIED:
        reason = f"its weights are too many ({size:,}) to try it on fresh ones: load it first"
        return ModelDescription({**_outline(outline, tokenizer), **own}, _untried(None, reason))
    try:
        fresh = as_language_model(
            fresh_weights(auto, config, torch.float32, 0, trust_remote_code), tokenizer, name=name
        )
    except UnsupportedModelError as error:
        return ModelDescription(
            {**_outline(outline, tokenizer), **own}, _untried(False, first_line(error))
        )
    tried = _describe(fresh)
    return ModelDescription({**tried.facts, **own}, tried.verbs)


def _describe(lm: LanguageModel) -> ModelDescription:
    from geomstats_lm.parts import find_parts

    facts = {**_outline(lm.model, lm.tokenizer), "name": lm.name}
    facts["n_layers"], facts["dim"] = lm.n_layers, lm.dim
    facts["vocabulary"] = lm.vocabulary
    places = dict.fromkeys(str(p.device) for p in lm.model.parameters())
    facts["device"] = ", ".join("disk" if place == "meta" else place for place in places)
    facts["weights"] = (
        "fresh" if lm.attrs.get("untrained") else
        "dequantized" if lm.attrs.get("dequantized") else "read"
    )  # fmt: skip
    parts, why = None, ""
    try:
        parts = find_parts(lm)
    except Exception as error:  # code of any model runs here
        why = first_line(error)
        if next(lm.model.parameters()).dtype != torch.float32:
            why += " (parts are told by what adds up: try dtype='float32')"
    if parts is not None:
        facts["mixer"] = _by_block([p.mixer for p in parts])
        facts["mlp"] = _by_block([p.mlp for p in parts])
    facts["final_norm"] = _final_norm(lm)
    split = Support("parts", parts is not None, why or "mixer and MLP add up to the update")
    return ModelDescription(facts, (*_patching(lm), split, _alone(lm)))


def _outline(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What can be told without running the model."""
    from geomstats_lm.corpus import _prefix

    text = text_config(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    try:
        blocks: tuple[nn.Module, ...] = find_blocks(model, text)
    except UnsupportedModelError:
        blocks = ()
    limit = longest_window(model)
    added = [] if tokenizer is None else _prefix(tokenizer)
    bos = "no tokenizer" if tokenizer is None else "none is put before a text"
    if added:
        bos = f"{' '.join(tokenizer.convert_ids_to_tokens(added))} is put before a text"
    return {
        "name": type(model).__name__,
        "architecture": type(model).__name__,
        "model_type": str(getattr(model.config, "model_type", "")),
        "n_layers": len(blocks),
        "dim": int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0),
        "vocabulary": int(head.weight.shape[0]) if head is not None else 0,
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": "",
        "weights": "",
        "context": None if limit >= 1 << 30 else limit,
        "bos": bos,
        "tied": bool(head is not None and head.weight is embeddings.weight),
        "block": _by_block([type(block).__name__ for block in blocks]),
        "mixer": "",
        "mlp": "",
        "final_norm": "",
    }


def _untried(supported: bool | None, reason: str) -> tuple[Support, ...]:
    verbs = ("extract", "perturb_all", "perturb_single", "parts", "self_only")
    return tuple(Support(verb, supported, reason) for verb in verbs)


def _patching(lm: LanguageModel) -> tuple[Support, ...]:
    if not lm.causal:
        no = "it is not causal, so patching a position has no defined effect on the next token"
        return (
            Support("extract", True, "states only: it does not predict the next token"),
            Support("perturb_all", False, no),
            Support("perturb_single", False, no),
        )
    ids = _random_ids(lm, 2, 9)
    one_pass = appends_exactly(lm, ids, capture(lm, ids, head=False)[0])
    how = "all in one pass" if one_pass else (
        "batched, a row of a batch per position: a patched token appended to its window does not "
        "give what it gives in its place (positions or masks that the mixer does not take)"
    )  # fmt: skip
    without = "" if lm.vocabulary else "no language-model head: "
    return (
        Support("extract", True, without + ("states only" if without else "states and loss")),
        Support("perturb_all", True, without + ("final states are compared" if without else "")),
        Support("perturb_single", True, how),
    )


def _alone(lm: LanguageModel) -> Support:
    """Whether a block run on tokens alone gives what the model gives on windows of length one."""
    from geomstats_lm.self_only import run_block

    ids = _random_ids(lm, 4, 1)
    try:
        states = [s[:, 0].float().cpu() for s in capture(lm, ids, head=False)[0]]
        for layer in sorted({1, lm.n_layers}):
            found = run_block(lm, layer, states[layer - 1].numpy(), ids[:, 0].numpy())
            off = float((torch.from_numpy(found) - states[layer]).abs().max())
            exact = next(lm.model.parameters()).dtype == torch.float32
            if not off <= (1e-4 if exact else 2e-2) * float(states[layer].abs().max()):
                return Support(
                    "self_only", False, f"block {layer} run by itself is off by {off:.2g}"
                )
    except Exception as error:  # code of any model runs here
        return Support(
            "self_only", False,
            f"a block does not run by itself: {type(error).__name__}: {first_line(error)}",
        )  # fmt: skip
    return Support("self_only", True, "")


@torch.no_grad()
def _final_norm(lm: LanguageModel) -> str:
    """The modules that normalize between the last block and the head, in the order they run."""
    after: list[str] = []
    passed: list[bool] = []
    inside = {id(m) for block in lm.blocks for m in block.modules()}

    def noting(name: str) -> Callable[..., None]:
        return lambda module, args: after.append(name) if passed else None

    with ExitStack() as stack:
        stack.callback(
            lm.blocks[-1].register_forward_hook(lambda *_: passed.append(True)).remove
        )  # fmt: skip
        for name, module in lm.model.named_modules():
            if "norm" in type(module).__name__.lower() and id(module) not in inside:
                stack.callback(module.register_forward_pre_hook(noting(name)).remove)
        lm.model(input_ids=_random_ids(lm, 1, 2).to(lm.device))
    return ", ".join(dict.fromkeys(after)) or "none"


def _random_ids(lm: LanguageModel, rows: int, length: int) -> torch.Tensor:
    embeddings: Any = lm.model.get_input_embeddings()
    return torch.randint(
        0, int(embeddings.weight.shape[0]), (rows, min(length, longest_window(lm.model))),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def _by_block(names: list[str]) -> str:
    """One name where all blocks agree, else each with the number of blocks that have it."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    if len(counts) <= 1:
        return names[0] or "none" if names else ""
    return ", ".join(f"{name or 'none'} ({n} blocks)" for name, n in counts.items())


def _shown(value: Any) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value) or "–"
