"""Do the blocks of a model form a stack that can be read and resumed?

One tiny forward proves that ``h_l = block_l(h_{l-1})`` holds, and that the model resumed from any
``h_l`` gives the output it gave; else the model is refused by reason.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from geomstats_lm.blocks import (
    LanguageModel,
    UnsupportedModelError,
    capture,
    resume,
    state_argument,
    state_of,
)
from geomstats_lm.cube import model_key


def as_language_model(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    attrs: dict[str, Any] | None = None,
) -> LanguageModel:
    """Make a loaded transformers model a checked stack of blocks.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    tokenizer : transformers tokenizer, optional
    name : str, optional
        Name to keep it under; its architecture's by default.
    attrs : dict, optional
        What else is to be recorded about it.

    Returns
    -------
    LanguageModel

    Raises
    ------
    UnsupportedModelError
        If its blocks do not form a stack: the message says what does not agree.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> tiny = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))
    >>> as_language_model(tiny, name="tiny").n_layers
    2
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__}: {config.model_type} is an encoder-decoder; causal decoders "
            "are supported"
        )
    prepare_config(config)
    model.eval().requires_grad_(False)
    text = text_config(model)
    name = name or type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    description = {
        "architecture": type(model).__name__,
        "model_type": str(getattr(config, "model_type", "")),
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "model_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **(attrs or {}),
    }
    candidate = LanguageModel(
        model, tokenizer, name, model_key(name), find_blocks(model, text),
        _width(text), int(head.weight.shape[0]) if head is not None else 0, description,
    )  # fmt: skip
    try:
        return _check_contract(candidate)
    except UnsupportedModelError:
        raise
    except Exception as error:  # any code of any model may run here
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise UnsupportedModelError(
            f"{_who(candidate)}: it does not run on windows of token ids alone: "
            f"{type(error).__name__}: {reason}"
        ) from error


def parameter_checksum(lm: LanguageModel) -> str:
    """SHA-256 of all parameters, in the order of their names, wherever they are kept."""
    from accelerate.utils import align_module_device

    names = {name for name, _ in lm.model.named_parameters()}
    # kept on disk, tied weights are no longer one object; here they count once, as in memory
    tied = getattr(lm.model, "all_tied_weights_keys", None) or {}
    digest = hashlib.sha256()
    for name in sorted(name for name in names if tied.get(name) not in names):
        owner, _, own = name.rpartition(".")
        with align_module_device(lm.model.get_submodule(owner)):  # weights on disk are read
            parameter = getattr(lm.model.get_submodule(owner), own)
            digest.update(name.encode())
            flat = parameter.detach().contiguous().cpu().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def text_config(model: Any) -> Any:
    """The part of a configuration that is about text."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _width(text: Any) -> int:
    return int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0) or 0)


def prepare_config(config: Any) -> None:
    for part in {id(c): c for c in (config, getattr(config, "text_config", None)) if c}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False  # every forward reads whole windows from their start
        if hasattr(part, "rescale_every"):
            part.rescale_every = 0  # RWKV halves the stream between blocks otherwise


def find_blocks(model: nn.Module, text_config: Any) -> tuple[nn.Module, ...]:
    # where encoder and decoder differ in depth, the causal model is the decoder
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer")
    depth = next((int(d) for d in (getattr(text_config, n, None) for n in names) if d), 0)
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    fitting = [(n, m) for n, m in lists if len(m) == depth]
    # Blocks hold nearly all of a model's weights; per-layer lists of embeddings or experts do not.
    weight = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    outermost = [
        (n, m) for n, m in fitting if not any(n.startswith(f"{other}.") for other, _ in fitting)
    ]
    if not outermost:
        found = ", ".join(f"{n} ({len(m)})" for n, m in lists) or "none"
        raise UnsupportedModelError(
            f"{type(model).__name__}: no list of {depth} blocks as its config's depth says; "
            f"lists of modules: {found}"
        )
    return tuple(max(outermost, key=lambda pair: weight(pair[1]))[1])


@torch.no_grad()
def _check_contract(lm: LanguageModel) -> LanguageModel:
    """Prove on one tiny forward that the blocks are a stack that can be read and resumed."""
    who = _who(lm)
    ids = torch.randint(
        0, _vocabulary_of(lm), (2, min(9, longest_window(lm))),
        generator=torch.Generator().manual_seed(0),
    ).to(lm.device)  # fmt: skip
    seen: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, Any]] = []
    inputs: dict[int, torch.Tensor] = {}

    with ExitStack() as stack:
        for index, block in enumerate(lm.blocks):

            def before(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
                if not (args or "hidden_states" in kwargs):
                    raise UnsupportedModelError(f"{who}: block {index + 1} is given no state")
                inputs[index] = state_argument(args, kwargs).clone()

            def after(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
                state = state_of(output)
                if not isinstance(state, torch.Tensor):
                    raise UnsupportedModelError(
                        f"{who}: block {index + 1} returns {type(state).__name__}, not a state"
                    )
                rest = tuple(output[1:]) if isinstance(output, (tuple, list)) else None
                seen.append((index, inputs[index], state.clone(), state, rest))

            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        output = lm.model(input_ids=ids)
    if [entry[0] for entry in seen] != list(range(lm.n_layers)):
        raise UnsupportedModelError(
            f"{who}: its {lm.n_layers} blocks ran in the order {[e[0] + 1 for e in seen]}, "
            "not each once in turn"
        )
    dim = lm.dim or int(seen[0][2].shape[-1])
    infinite = [entry[0] + 1 for entry in seen if not torch.isfinite(entry[2]).all()]
    if infinite:
        raise UnsupportedModelError(
            f"{who}: the states after blocks {infinite[:5]} are not finite: are its weights?"
        )
    for index, given, returned, _, _ in seen:
        for what, state in (("input", given), ("output", returned)):
            if tuple(state.shape) != (*ids.shape, dim):
                raise UnsupportedModelError(
                    f"{who}: the {what} of block {index + 1} has shape {tuple(state.shape)}, "
                    f"not (batch, position, {dim})"
                )
        if index and not torch.equal(given, seen[index - 1][2].to(given.device)):
            raise UnsupportedModelError(
                f"{who}: the input of block {index + 1} is not the output of block {index}: "
                "something acts on the state between blocks"
            )
    lm = replace(
        lm,
        dim=dim,
        clones=any(not torch.equal(now, then) for _, _, then, now, _ in seen),
        block_rest=tuple(
            None if rest is None else tuple(None if torch.is_tensor(r) else r for r in rest)
            for *_, rest in seen
        ),
    )
    lm = replace(lm, causal=_is_causal(lm, ids, seen[-1][2]))
    logits = getattr(output, "logits", None)
    if logits is None:
        return lm  # states can be read; there is no output to perturb
    return _check_resume(lm, ids, seen, logits, who)


def _is_causal(lm: LanguageModel, ids: torch.Tensor, last: torch.Tensor) -> bool:
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % _vocabulary_of(lm)
    again = capture(lm, changed, head=False)[0][-1]
    return torch.allclose(again[:, :-1], last[:, :-1], rtol=1e-3, atol=1e-4)


def _who(lm: LanguageModel) -> str:
    return f"{lm.attrs['architecture']} ({lm.name})"


def _check_resume(
    lm: LanguageModel, ids: torch.Tensor, seen: list[Any], logits: torch.Tensor, who: str
) -> LanguageModel:
    for layer in sorted({1, (lm.n_layers + 1) // 2, lm.n_layers}):
        again = resume(lm, ids, layer, seen[layer - 1][2])
        if not torch.equal(again, logits):
            raise UnsupportedModelError(
                f"{who}: replacing the output of block {layer} by itself changes the logits by "
                f"{float((again - logits).abs().max()):.3g}: state passes beside the blocks' output"
            )
    # A model may reshape before its head; then all positions are computed and one is taken.
    rows = torch.tensor([[0], [ids.shape[1] - 1]])
    try:
        picked = resume(replace(lm, gathers_rows=True), ids, lm.n_layers, seen[-1][2], rows=rows)
        expected = logits[torch.arange(2), rows[:, 0]][:, None]
        gathers = picked.shape == expected.shape and torch.allclose(
            picked, expected, rtol=1e-3, atol=1e-3
        )
    except (RuntimeError, IndexError, ValueError, AttributeError):
        gathers = False
    return replace(lm, gathers_rows=gathers, vocabulary=int(logits.shape[-1]))


def longest_window(model: Any) -> int:
    """Tokens a LanguageModel, or a model of transformers, can read at once, by its config."""
    text = text_config(model.model if isinstance(model, LanguageModel) else model)
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    # no entry, or -1 as XLNet writes it: no limit
    return int(longest) if longest and longest > 0 else 1 << 30


def _vocabulary_of(lm: LanguageModel) -> int:
    embeddings: Any = lm.model.get_input_embeddings()
    return int(embeddings.weight.shape[0])
