"""How does the name of any causal language model become the model, in memory and checked?

``load_model("hub/id" | "folder" | "file.gguf")``; what cannot be a stack of blocks is refused by
reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from geomstats_lm.blocks import LanguageModel, UnsupportedModelError
from geomstats_lm.contract import as_language_model as as_language_model
from geomstats_lm.contract import longest_window as longest_window
from geomstats_lm.contract import parameter_checksum as parameter_checksum
from geomstats_lm.contract import prepare_config

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def load_model(
    name_or_path: str | Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    device_map: str | Mapping[str, Any] | None = None,
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
    device_map : str or mapping, optional
        In place of ``device``, for models larger than one device: ``"auto"`` or another strategy of
        accelerate, or a mapping from names of modules to devices (``"disk"`` and, beside an
        accelerator, ``"cpu"`` hold the weights of a module until it runs).
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
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: accepted are {', '.join(DTYPES)}")
    _check_device(device)
    placed = _checked_map(device_map, device, untrained)
    tokenizer = load_tokenizer(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    source, where = source_of(name_or_path, revision, trust_remote_code)
    config = read_config(source, where)
    auto = auto_class(config, trust_remote_code)
    if untrained:
        model = fresh_weights(auto, config, DTYPES[dtype], seed, trust_remote_code)
    else:
        model = _pretrained(auto, source, config, DTYPES[dtype], {**where, **placed})
    name = name or default_name(name_or_path, untrained=untrained)
    attrs = {
        "model_source": str(name_or_path),
        "revision": revision or getattr(config, "_commit_hash", None) or "",
        "untrained": int(untrained),
        "dequantized": int(is_gguf(name_or_path)),
    }
    if not placed:
        model = model.to(device)
    return as_language_model(model, tokenizer, name=name, attrs=attrs)


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

    source, where = source_of(name_or_path, revision, trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except Exception as error:  # files of any origin fail in any way
        raise FileNotFoundError(_nowhere("tokenizer", source, where, error)) from None
    only_special = len(tokenizer) <= len(set(tokenizer.all_special_ids))
    if only_special or not tokenizer("a b", add_special_tokens=False).input_ids:
        raise FileNotFoundError(f"name_or_path: {source!r} comes without a tokenizer's vocabulary")
    return tokenizer


def read_config(source: str, where: Mapping[str, Any]) -> Any:
    """The configuration of a model, made ready to run whole windows; encoder-decoders refused."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, **where)
    except OSError as error:
        raise FileNotFoundError(_nowhere("model", source, where, error)) from None
    except Exception as error:  # files of any origin fail in any way
        raise UnsupportedModelError(
            f"{_title(source, where)}: transformers cannot read it: {first_line(error)}"
        ) from None
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source}: {config.model_type} is an encoder-decoder; causal decoders are supported"
        )
    prepare_config(config)
    return config


def auto_class(config: Any, trust_remote_code: bool) -> Any:
    """The class of transformers that makes the model: without a head where there is none."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    remote = trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or remote
    return AutoModelForCausalLM if causal else AutoModel


def fresh_weights(
    auto: Any, config: Any, dtype: torch.dtype, seed: int, trust_remote_code: bool
) -> Any:
    """The architecture of a configuration with weights drawn anew."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # configurations of any origin fail in any way
        raise UnsupportedModelError(
            f"{config.model_type}: no model can be made of its configuration: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from None


def _pretrained(auto: Any, source: str, config: Any, dtype: Any, where: dict[str, Any]) -> Any:
    """Load weights, all of them: what a checkpoint lacks transformers would fill with noise."""
    from transformers import AutoModel

    missing: list[str] = []
    title = _title(source, where)
    with _no_progress_bars():
        for kind in (auto, AutoModel):  # a checkpoint of the base model alone has no head
            try:
                model, report = kind.from_pretrained(
                    source, config=config, dtype=dtype, output_loading_info=True,
                    ignore_mismatched_sizes=True, **where,
                )  # fmt: skip
            except Exception as error:  # files of any origin fail in any way
                raise UnsupportedModelError(
                    f"{title}: its weights cannot be loaded: {type(error).__name__}: "
                    f"{first_line(error)}"
                ) from None
            if report["mismatched_keys"]:  # these too would be random
                name, found, wanted = min(report["mismatched_keys"])
                raise UnsupportedModelError(
                    f"{title}: {len(report['mismatched_keys'])} weights of the checkpoint have not "
                    f"the shape that its config says, such as {name}: {tuple(found)}, not "
                    f"{tuple(wanted)}"
                )
            if not report["missing_keys"]:
                return model
            missing = missing or sorted(report["missing_keys"])
    raise UnsupportedModelError(
        f"{title}: the checkpoint lacks {len(missing)} of the weights its config asks for, such "
        f"as {', '.join(missing[:3])}; they would be random"
    )


def default_name(name_or_path: str | Path, *, untrained: bool = False) -> str:
    """Name of a model that was given none: its hub id, or the name of its folder or file."""
    path = Path(name_or_path)
    name = str(name_or_path)
    if path.exists():
        name = path.stem if path.is_file() else path.resolve().name
    return f"{name}-untrained" if untrained else name


def is_gguf(name_or_path: str | Path) -> bool:
    return Path(name_or_path).suffix.lower() == ".gguf"


def source_of(
    name_or_path: str | Path, revision: str | None, trust_remote_code: bool
) -> tuple[str, dict[str, Any]]:
    """What transformers' ``from_pretrained`` takes to load the model."""
    path = Path(name_or_path)
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if is_gguf(path) and path.is_file():
        return str(path.parent), {**where, "gguf_file": path.name}
    looks_local = path.is_absolute() or str(name_or_path).startswith((".", "~"))
    if not path.exists() and (
        looks_local or is_gguf(path) or len(path.parts) > 2 or str(name_or_path).endswith("/")
    ):
        raise FileNotFoundError(f"name_or_path: there is no model folder or file {path}")
    if path.is_file():
        raise FileNotFoundError(
            f"name_or_path: {path} is a file, but no .gguf; a model in transformers format is a "
            "folder"
        )
    if path.exists() and not (path / "config.json").exists():
        held = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; it holds {', '.join(held[:3])}: give the path of the file" if held else ""
        raise FileNotFoundError(
            f"name_or_path: {path} holds no config.json, so it is no transformers model{hint}"
        )
    return str(name_or_path), where


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _title(source: str, where: Mapping[str, Any]) -> str:
    return f"{source}/{where['gguf_file']}" if "gguf_file" in where else source


def _nowhere(what: str, source: str, where: Mapping[str, Any], error: BaseException) -> str:
    """Neither a folder nor a hub id: a name with one slash may have been meant as either."""
    if Path(source).is_dir():
        return f"name_or_path: no {what} in {_title(source, where)} ({first_line(error)})"
    return (
        f"name_or_path: there is no folder {source!r} here ({Path.cwd()}), and as a hub id it "
        f"gives no {what} ({first_line(error)})"
    )


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device={device!r}: accepted are 'cpu', 'cuda', 'cuda:0', …") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: no CUDA device is available here")


def _checked_map(
    device_map: str | Mapping[str, Any] | None, device: str, untrained: bool
) -> dict[str, Any]:
    """What ``from_pretrained`` takes to place modules on several devices."""
    if device_map is None:
        return {}
    if device != "cpu":
        raise ValueError(f"device={device!r}, device_map={device_map!r}: give one of them")
    if untrained:
        raise ValueError("device_map: fresh weights are drawn on one device; give device=")
    if isinstance(device_map, str):
        if device_map not in STRATEGIES:
            raise ValueError(
                f"device_map={device_map!r}: accepted are {', '.join(STRATEGIES)}, or a mapping "
                "from names of modules to devices"
            )
        return {"device_map": device_map}
    for module, place in device_map.items():
        if place == "meta":
            raise ValueError(
                f"device_map: {module!r} on 'meta' would have no weights, so nothing could run"
            )
        if place != "disk":
            _check_device(f"cuda:{place}" if isinstance(place, int) else str(place))
    return {"device_map": dict(device_map)}


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


def untrained_model(model: Any, *, seed: int = 0) -> Any:
    """The same architecture with fresh weights.

    Parameters
    ----------
    model : LanguageModel
    seed : int
        Of the weights.

    Returns
    -------
    LanguageModel
        Named ``<name>-untrained``.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from geomstats_lm import as_language_model
    >>> tiny = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))
    >>> untrained_model(as_language_model(tiny, name="tiny")).name
    'tiny-untrained'
    """
    parameter = next(model.model.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(model.model)(copy.deepcopy(model.model.config))
    return as_language_model(
        fresh.to(parameter.device, parameter.dtype), model.tokenizer,
        name=f"{model.name}-untrained", attrs={"untrained": 1},
    )  # fmt: skip
