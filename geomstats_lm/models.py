"""How does any causal language model become a stack of blocks?

Loaded by hub id, folder or GGUF file, a model proves on one tiny forward that
``h_l = block_l(h_{l-1})`` holds and that it can be resumed from any h_l, or is refused by reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
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

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    name_or_path: str | Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    untrained: bool = False,
    seed: int = 0,
) -> LanguageModel:
    """Load a causal language model by hub id, folder or GGUF file.

    Parameters
    ----------
    name_or_path : str or Path
        Hub id, local folder in transformers format, or a ``.gguf`` file.
    name : str, optional
        Name to keep it under; the hub id, or the name of the folder or file, by default.
    device : str
        Where it runs, such as ``"cpu"`` or ``"cuda"``.
    dtype : {"float32", "float16", "bfloat16"}
        Dtype it computes in.
    revision : str, optional
        Revision on the hub.
    trust_remote_code : bool
        Whether code that comes with the model may run.
    untrained : bool
        Keep the architecture and draw fresh weights.
    seed : int
        Of the fresh weights.

    Returns
    -------
    LanguageModel

    Raises
    ------
    FileNotFoundError
        If the path, or a model of that name, cannot be found.
    UnsupportedModelError
        If it is no causal model, or its blocks do not form a stack.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_path
    >>> model = load_model(example_path("gpt2"))
    >>> model.n_layers, model.dim
    (6, 192)
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}: accepted are 'cpu', 'cuda', 'cuda:0', …") from None
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: no CUDA device is available here")
    tokenizer = load_tokenizer(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    source, where = _source(name_or_path, revision, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(source, **where)
    except OSError as error:
        raise FileNotFoundError(
            f"name_or_path: no model {source!r} here or on the hub ({str(error).splitlines()[0]})"
        ) from None
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{source}: transformers cannot read it: {error}") from None
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source}: {config.model_type} is an encoder-decoder; causal decoders are supported"
        )
    _prepare_config(config)
    # A model without a language-model head is read by its base class: states, no output.
    remote = trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or remote
    auto = AutoModelForCausalLM if causal else AutoModel
    if untrained:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(
                config, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
            )
    else:
        model = _pretrained(auto, source, config, DTYPES[dtype], where)
    name = name or default_name(name_or_path, untrained=untrained)
    attrs = {
        "model_source": str(name_or_path),
        "revision": revision or getattr(config, "_commit_hash", None) or "",
        "untrained": int(untrained),
        "dequantized": int(Path(name_or_path).suffix == ".gguf"),
    }
    return as_language_model(model.to(device), tokenizer, name=name, attrs=attrs)


def load_tokenizer(
    name_or_path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the tokenizer of a model by hub id, folder or GGUF file.

    Parameters
    ----------
    name_or_path, revision, trust_remote_code
        As in :func:`load_model`.

    Returns
    -------
    transformers tokenizer

    Raises
    ------
    FileNotFoundError
        If there is no such model, or it comes without a tokenizer.

    Examples
    --------
    >>> from geomstats_lm.datasets import example_path
    >>> len(load_tokenizer(example_path("gpt2")))
    4096
    """
    from transformers import AutoTokenizer

    source, where = _source(name_or_path, revision, trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except Exception as error:  # files of any origin fail in any way
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"name_or_path: no tokenizer of {source!r} here or on the hub ({first})"
        ) from None
    if not tokenizer("a b", add_special_tokens=False).input_ids:
        raise FileNotFoundError(f"name_or_path: {source!r} comes without a tokenizer's vocabulary")
    return tokenizer


def _pretrained(auto: Any, source: str, config: Any, dtype: Any, where: dict[str, Any]) -> Any:
    """Load weights, all of them: what a checkpoint lacks transformers would fill with noise."""
    from transformers import AutoModel

    missing: list[str] = []
    with _no_progress_bars():
        for kind in (auto, AutoModel):  # a checkpoint of the base model alone has no head
            try:
                model, report = kind.from_pretrained(
                    source, config=config, dtype=dtype, output_loading_info=True, **where
                )
            except Exception as error:  # files of any origin fail in any way
                first = (str(error).splitlines() or [""])[0]
                raise UnsupportedModelError(
                    f"{source}: its weights cannot be loaded: {type(error).__name__}: {first}"
                ) from None
            if not report["missing_keys"]:
                return model
            missing = missing or sorted(report["missing_keys"])
    raise UnsupportedModelError(
        f"{source}: the checkpoint lacks {len(missing)} of the weights its config asks for, such "
        f"as {', '.join(missing[:3])}; they would be random"
    )


def default_name(name_or_path: str | Path, *, untrained: bool = False) -> str:
    """Name of a model that was given none: its hub id, or the name of its folder or file."""
    path = Path(name_or_path)
    name = str(name_or_path)
    if path.exists():
        name = path.stem if path.is_file() else path.resolve().name
    return f"{name}-untrained" if untrained else name


def _source(
    name_or_path: str | Path, revision: str | None, trust_remote_code: bool
) -> tuple[str, dict[str, Any]]:
    """What transformers' ``from_pretrained`` takes to load the model."""
    path = Path(name_or_path)
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {**where, "gguf_file": path.name}
    looks_local = path.is_absolute() or str(name_or_path).startswith((".", "~"))
    if not path.exists() and (looks_local or path.suffix == ".gguf" or len(path.parts) > 2):
        raise FileNotFoundError(f"name_or_path: there is no model folder or file {path}")
    if path.exists() and not (path / "config.json").exists():
        raise FileNotFoundError(
            f"name_or_path: {path} holds no config.json, so it is no transformers model"
        )
    return str(name_or_path), where


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


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
    _prepare_config(config)
    model.eval().requires_grad_(False)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
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
        model, tokenizer, name, model_key(name), _find_blocks(model, text),
        int(getattr(text, "hidden_size", 0) or getattr(text, "n_embd", 0)),
        int(head.weight.shape[0]) if head is not None else 0, description,
    )  # fmt: skip
    return _check_contract(candidate)


def parameter_checksum(lm: LanguageModel) -> str:
    """SHA-256 of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(lm.model.named_parameters()):
        digest.update(name.encode())
        flat = parameter.detach().contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _prepare_config(config: Any) -> None:
    for part in {id(c): c for c in (config, getattr(config, "text_config", None)) if c}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False  # every forward reads whole windows from their start
        if hasattr(part, "rescale_every"):
            part.rescale_every = 0  # RWKV halves the stream between blocks otherwise


def _find_blocks(model: nn.Module, text_config: Any) -> tuple[nn.Module, ...]:
    depth = int(getattr(text_config, "num_hidden_layers", 0) or getattr(text_config, "n_layer", 0))
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
    who = f"{lm.attrs['architecture']} ({lm.name})"
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
        if index and not torch.equal(given, seen[index - 1][2]):
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


def longest_window(lm: LanguageModel) -> int:
    """Tokens the model can read at once, by its config."""
    config: Any = lm.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    # no entry, or -1 as XLNet writes it: no limit
    return int(longest) if longest and longest > 0 else 1 << 30


def _vocabulary_of(lm: LanguageModel) -> int:
    embeddings: Any = lm.model.get_input_embeddings()
    return int(embeddings.weight.shape[0])
