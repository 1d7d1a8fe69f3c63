"""Which trained models and which text come with the package, to try everything on?

``name -> folder of weights -> load_model(folder)``. A checkout holds all of them under ``data/``;
an installed wheel carries two models and the text, and says where the others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from geomstats_lm.blocks import LanguageModel

# Every model of the repository; what is on disk may be fewer of them.
MODELS = (
    "gpt2",
    "mamba2",
    "rwkv",
    "llama",
    "gpt_neox",
    "hybrid",
    "gpt2-step50",
    "gpt2-step200",
    "gpt2-step800",
)
PACKAGED = Path(__file__).resolve().parent / "_data"
CHECKOUT = Path(__file__).resolve().parents[1] / "data"


def available_models() -> list[str]:
    """Return the names of the example models that can be loaded here.

    Returns
    -------
    list of str
        All of the repository's in a checkout, ``gpt2`` and ``mamba2`` in an installed wheel.

    Examples
    --------
    >>> available_models()[:2]
    ['gpt2', 'mamba2']
    """
    return [name for name in MODELS if _has_weights(_root() / "models" / name)]


def example_path(name: str) -> Path:
    """Return the folder of an example model: weights, configuration, tokenizer and card.

    Parameters
    ----------
    name : str
        One of :func:`available_models`.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    ValueError
        If there is no example model of that name.
    FileNotFoundError
        If the model is one of the repository's, but not part of this installation.

    Examples
    --------
    >>> example_path("gpt2").name
    'gpt2'
    """
    if name not in MODELS:
        raise ValueError(f"name={name!r} is not an example model; they are {', '.join(MODELS)}")
    folder = _root() / "models" / name
    if not _has_weights(folder):
        here = ", ".join(available_models()) or "none"
        raise FileNotFoundError(
            f"name={name!r}: this installation holds no weights of it (it has: {here}). A checkout "
            f"of the repository holds them in data/models/{name}; or train them there with "
            f"`python data/train_models.py {name.split('-')[0]}`"
        )
    return folder


def load_example(name: str, **options: Any) -> LanguageModel:
    """Load an example model.

    Parameters
    ----------
    name : str
        One of :func:`available_models`.
    **options
        Passed on to :func:`geomstats_lm.load_model`, such as ``untrained=True, seed=1`` for the
        same architecture before any training.

    Returns
    -------
    LanguageModel

    Raises
    ------
    ValueError, FileNotFoundError
        As :func:`example_path`.

    Examples
    --------
    >>> load_example("gpt2").dim
    192
    """
    path = example_path(name)
    from geomstats_lm.models import load_model  # torch is slow to import: only when a model is

    return load_model(path, **options)


def example_corpus() -> pd.DataFrame:
    """Return the evaluation text: documents that none of the example models was trained on.

    Returns
    -------
    pandas.DataFrame
        One row a document, as :func:`geomstats_lm.read_corpus` gives it: addresses on the State
        of the Union from all eras, scenes of Shakespeare, chapters of the King James Bible.

    Raises
    ------
    FileNotFoundError
        If the installation holds no text.

    Examples
    --------
    >>> len(example_corpus()) >= 40
    True
    """
    path = _root() / "text" / "heldout.jsonl"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: this installation holds no example text; "
            "`python data/fetch_text.py` in a checkout of the repository makes it"
        )
    from geomstats_lm.corpus import read_corpus

    return read_corpus(path)


def _root() -> Path:
    # A wheel carries its data inside the package; in a checkout they lie beside it.
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def example_node(
    name: str = "gpt2", classes: Sequence[str] = ("mean", "affine"), *, model: Any = None
) -> Any:
    """A small node of a study in memory: activations and decomposition of an example model.

    Parameters
    ----------
    name : str
        Of :func:`available_models`.
    classes : sequence of str
        Labels of function classes.
    model : LanguageModel, optional
        The model, where it is loaded already.

    Returns
    -------
    xarray.DataTree
        24 reference and 6 evaluation windows of 16 tokens, k = 8.

    Raises
    ------
    FileNotFoundError
        If the model or the text is not there.

    Examples
    --------
    >>> sorted(example_node().children)
    ['activations', 'decomposition']
    """
    import xarray as xr

    from geomstats_lm.decompose import decompose
    from geomstats_lm.extract import extract

    model = model if model is not None else load_example(name)
    activations = extract(model, example_corpus(), length=16, n_windows=(24, 6), progress=False)
    parts = decompose(activations, classes, k=8, model=model).compute()
    return xr.DataTree.from_dict({"activations": activations, "decomposition": parts})
