"""How much of each layer's update does the token's own state explain?

``D_l = h_l - h_{l-1} = t_l + r_l`` with the tokenwise part ``t_l = T_l(h_{l-1}) - h_{l-1}`` from a
restricted function class fitted on reference tokens, and the residual ``r_l`` what it misses.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from geomstats_lm import layer_fits
from geomstats_lm.class_labels import FunctionClass, parse_classes
from geomstats_lm.layer_graph import LayerGraph
from geomstats_lm.neighbours import METRICS

DEFAULT_CLASSES = (
    "identity", "mean", "token_mean", "local_mean", "diagonal", "linear", "affine",
    "affine[scope=global]",
)  # fmt: skip
KEEP = ("state", "update", "tokenwise", "residual")
TOKEN_COORDS = (
    "document", "sequence", "position", "token_id", "char_start", "char_end", "split",
    "is_special",
)  # fmt: skip
EXCLUDE = ("document", "sequence", "self")


def decompose(
    data: xr.DataTree | xr.Dataset,
    classes: Sequence[str] = DEFAULT_CLASSES,
    *,
    k: int = 32,
    ridge: float | str | None = None,
    target: str = "update",
    metric: str = "euclidean",
    exclude: str = "document",
    reference: int | None = None,
    layers: Sequence[int] | None = None,
    tokens: str = "evaluation",
    keep: Sequence[str] = KEEP,
    device: str = "cpu",
    seed: int = 0,
    store: str | Path | None = None,
    model: Any = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Split every update into a tokenwise part and a residual, one split per function class.

    Parameters
    ----------
    data : xarray.DataTree or xarray.Dataset
        A model's node of a study, or the activations that ``extract`` returned:
        ``hidden`` (model, layer, token, dim) with the token coordinates.
    classes : sequence of str
        Labels such as ``"affine"`` or ``"low_rank[rank=4]"``.
    k : int
        Nearest reference tokens of each local fit.
    ridge : float or "cv", optional
        rho of every class that has one; None takes each class's default, "cv" chooses it per
        class and layer by held-out error within the reference documents.
    target : {"update", "state"}
        Whether maps are fitted to D or to h_l.
    metric : {"euclidean", "cosine", "standardized"}
        Distance between states, always about the reference mean.
    exclude : {"document", "sequence", "self"}
        A token is never fitted with reference tokens of its own document, sequence or itself.
    reference : int, optional
        Most reference tokens to use, whole documents in a random order; all by default.
    layers : sequence of int, optional
        Layers (1..L) that updates arrive at; by default all whose states and those of the layer
        before are there, with a warning that names those without a neighbour.
    tokens : {"evaluation", "reference"}
        Which documents' tokens to decompose; "reference" is leave-one-out, also for global maps
        (which leave out the token's document, or its sequence where ``exclude`` is narrower).
    keep : sequence of {"state", "update", "tokenwise", "residual"}
        The variables with a ``dim`` to return.
    device : str
        "cpu", or a torch device such as "cuda".
    seed : int
        Of everything random.
    store : str or Path, optional
        Study to write the leaf ``decomposition`` into, chunk by chunk.
    model : LanguageModel, optional
        Needed by the class ``self_only`` alone.
    overwrite, progress : bool
        As in ``write_leaf``.

    Returns
    -------
    xarray.Dataset
        Lazy: ``state`` and ``update`` (model, layer, token, dim), ``tokenwise`` and ``residual``
        (model, function_class, layer, token, dim), per token ``is_massive``,
        ``neighbour_distance``, ``same_token_fraction``, ``effective_df``, and summaries of the
        reference per layer.  Units are those of the states.

    Raises
    ------
    ValueError
        If an argument is not among those accepted, or a token is left with fewer than ``k``
        reference tokens.

    Examples
    --------
    >>> from geomstats_lm import extract
    >>> from geomstats_lm.datasets import example_corpus, load_example
    >>> model = load_example("gpt2")
    >>> states = extract(model, example_corpus(), length=32, n_windows=(12, 2), progress=False)
    >>> parts = decompose(states, ["mean", "affine[k=8]"], k=4)
    >>> parts.tokenwise.dims
    ('model', 'function_class', 'layer', 'token', 'dim')
    >>> parts.function_class.values.tolist()
    ['mean', 'affine[k=8]']
    """
    activations = _activations(data)
    chosen = parse_classes(classes, ridge=ridge)
    options = _check_options(
        activations, chosen, k=k, target=target, metric=metric, exclude=exclude,
        reference=reference, layers=layers, tokens=tokens, keep=keep, device=device, seed=seed,
    )  # fmt: skip
    if any(c.name == "self_only" for c in chosen):
        _check_model(activations, model)
    lazy = _lazy_dataset(activations, chosen, options, model)
    if store is None:
        return lazy
    from geomstats_lm.cube import write_leaf

    return write_leaf(
        lazy, store, str(activations["model"].values[0]), "decomposition",
        settings=_settings(activations, chosen, options), overwrite=overwrite, progress=progress,
    )  # fmt: skip


def decomposition_of(
    data: xr.DataTree | xr.Dataset,
    classes: Sequence[str],
    *,
    windows: int | None,
    rng: np.random.Generator,
    ridge: float | str | None = None,
    **options: Any,
) -> xr.Dataset:
    """The lazy decomposition of some random windows only, for the verbs that choose settings.

    Options are those of :func:`decompose`, with the same defaults.
    """
    defaults = {
        "k": 32, "target": "update", "metric": "euclidean", "exclude": "document",
        "reference": None, "layers": None, "tokens": "evaluation", "keep": KEEP, "device": "cpu",
        "seed": 0,
    }  # fmt: skip
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ValueError(f"unknown options {unknown}; accepted are {sorted(defaults)}")
    activations = _activations(data)
    chosen = parse_classes(classes, ridge=ridge)
    checked = _check_options(activations, chosen, **{**defaults, **options})
    if windows is not None:
        rows = checked["query_rows"]
        sequence = activations["sequence"].values[rows]
        names = np.unique(sequence)
        picked = rng.permutation(names)[:windows]
        checked["query_rows"] = rows[np.isin(sequence, picked)]
    return _lazy_dataset(activations, chosen, checked, None)


def usable_references(data: xr.DataTree | xr.Dataset) -> int:
    """Number of tokens that may serve as references by their labels."""
    activations = _activations(data)
    labels = {name: activations[name].values for name in TOKEN_COORDS}
    return len(_reference_rows(labels, None, 0))


def _activations(data: Any) -> xr.Dataset:
    if isinstance(data, xr.DataTree):
        if "activations" in data.children:
            data = data["activations"].to_dataset()
        else:
            data = data.to_dataset()
    if not isinstance(data, xr.Dataset) or "hidden" not in data:
        raise ValueError(
            "data must be a model's node of a study, or a Dataset of activations with 'hidden'; "
            f"this {type(data).__name__} has none"
        )
    if data["hidden"].dims != ("model", "layer", "token", "dim") or data.sizes["model"] != 1:
        raise ValueError(
            "data: hidden must have dims (model, layer, token, dim) with one model, got "
            f"{dict(data['hidden'].sizes)}"
        )
    missing = [name for name in TOKEN_COORDS if name not in data.coords]
    if missing:
        raise ValueError(f"data lacks the token coordinates {missing}")
    return data


def _check_options(
    activations: xr.Dataset, classes: Sequence[FunctionClass], **options: Any
) -> dict[str, Any]:
    """All options, checked against each other and against the labels before any long work."""
    for name, accepted in (
        ("target", ("update", "state")), ("metric", METRICS), ("exclude", EXCLUDE),
        ("tokens", ("evaluation", "reference")),
    ):  # fmt: skip
        if options[name] not in accepted:
            raise ValueError(
                f"{name}={options[name]!r}: accepted are {', '.join(map(repr, accepted))}"
            )
    unknown = [name for name in options["keep"] if name not in KEEP]
    if unknown:
        raise ValueError(f"keep contains {unknown}; accepted are {KEEP}")
    k = options["k"]
    if not isinstance(k, (int, np.integer)) or isinstance(k, bool) or k < 1:
        raise ValueError(f"k={k!r}: accepted are integers >= 1")
    present = activations["layer"].values
    arriving = [int(layer) for layer in present if layer - 1 in present]
    layers = options["layers"]
    options["layers"] = arriving if layers is None else [int(layer) for layer in layers]
    wrong = [layer for layer in options["layers"] if layer not in arriving]
    if wrong or not options["layers"] or len(set(options["layers"])) < len(options["layers"]):
        raise ValueError(
            f"layers={layers!r}: accepted are distinct layers among {arriving}; the update of "
            f"layer l needs the states of l - 1 and l, and data holds layers {present.tolist()}"
        )
    alone = sorted({int(n) for n in present} - {*arriving, *(n - 1 for n in arriving)})
    if layers is None and alone:
        warnings.warn(
            f"layers {alone} of data stand alone and give no update, which needs the states of "
            "layers l - 1 and l",
            stacklevel=3,
        )
    labels = {name: activations[name].values for name in TOKEN_COORDS}
    rows = _reference_rows(labels, options["reference"], options["seed"])
    wanted = 1 if options["tokens"] == "evaluation" else 0
    queries = np.flatnonzero(labels["split"] == wanted)
    if not queries.size:
        raise ValueError(f"tokens={options['tokens']!r}: data has no token with split == {wanted}")
    options["reference_rows"], options["query_rows"] = rows, queries
    options["largest_k"] = max([int(c["k"] or k) for c in classes if c.is_local], default=int(k))
    _check_counts(labels, rows, queries, options)
    rank_over = [c.label for c in classes if c.is_local and (c["rank"] or 0) > (c["k"] or k)]
    if rank_over:
        raise ValueError(f"classes {rank_over} ask for a rank above their k={k} neighbours")
    return options


def _check_model(activations: xr.Dataset, model: Any) -> None:
    from geomstats_lm.models import parameter_checksum

    if model is None or not hasattr(model, "blocks"):
        raise ValueError(
            f"model={model!r}: the class 'self_only' runs the model's blocks; give what "
            "load_model returned"
        )
    recorded = activations.attrs.get("parameter_checksum", "")
    if recorded and recorded != parameter_checksum(model):
        raise ValueError(f"model: {model.name} is not the one whose activations these are")


def _reference_rows(labels: Mapping[str, np.ndarray], most: int | None, seed: int) -> np.ndarray:
    """Tokens that may serve as references by their labels, at most ``most`` of them."""
    usable = (labels["split"] == 0) & (labels["position"] > 0) & ~labels["is_special"].astype(bool)
    rows = np.flatnonzero(usable)
    if most is None:
        return rows
    if not isinstance(most, (int, np.integer)) or most < 1:
        raise ValueError(f"reference={most!r}: accepted are None and integers >= 1")
    documents = np.unique(labels["document"][rows])
    order = np.random.default_rng(seed).permutation(len(documents))
    rank = order.argsort()[np.searchsorted(documents, labels["document"][rows])]
    return np.sort(rows[np.argsort(rank, kind="stable")[:most]])


def exclusion_groups(labels: Mapping[str, np.ndarray], exclude: str) -> np.ndarray:
    """The group of every token within which no token may be another's reference."""
    return np.arange(len(labels["split"])) if exclude == "self" else labels[exclude]


def _check_counts(
    labels: Mapping[str, np.ndarray], rows: np.ndarray, queries: np.ndarray,
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    groups = exclusion_groups(labels, options["exclude"])
    names, sizes = np.unique(groups[rows], return_counts=True)
    own = dict(zip(names.tolist(), sizes.tolist()))
    worst = max((own.get(g, 0) for g in np.unique(groups[queries]).tolist()), default=0)
    needed = options["largest_k"]
    if len(rows) - worst < needed:
        raise ValueError(
            f"k={needed}: only {len(rows) - worst} reference tokens are left for some token "
            f"({len(rows)} usable ones, {worst} of them in its own {options['exclude']}); "
            "give a smaller k, more reference documents, or a narrower exclude"
        )


def _settings(
    activations: xr.Dataset, classes: Sequence[FunctionClass], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What made the decomposition, as JSON keeps it."""
    named = ("target", "metric", "exclude", "reference", "layers", "tokens", "seed", "device")
    return {
        "classes": [c.label for c in classes],
        "ridge": {c.label: c["ridge"] for c in classes if c["ridge"] is not None},
        "k": int(options["k"]),
        "keep": list(options["keep"]),
        "parameter_checksum": activations.attrs.get("parameter_checksum"),
        "text_checksum": activations.attrs.get("text_checksum"),
        **{name: options[name] for name in named},
    }


def _lazy_dataset(
    activations: xr.Dataset,
    classes: Sequence[FunctionClass],
    options: Mapping[str, Any],
    model: Any,
) -> xr.Dataset:
    labels = {name: activations[name].values for name in TOKEN_COORDS}
    query_rows, layers = options["query_rows"], options["layers"]
    hidden = activations["hidden"].chunk({"dim": -1, "layer": 1})
    position = {int(layer): i for i, layer in enumerate(activations["layer"].values)}
    plan = layer_fits.Plan(
        classes=tuple(classes), k=int(options["k"]), largest_k=options["largest_k"],
        target=options["target"], metric=options["metric"], device=options["device"],
        seed=options["seed"], leave_out=options["tokens"] == "reference",
    )  # fmt: skip
    fold = labels["document" if options["exclude"] == "document" else "sequence"]
    graph = LayerGraph(
        hidden.data,
        _take(hidden, query_rows).chunk({"token": _run_length(activations, query_rows)}).data,
        {layer: (position[layer - 1], position[layer]) for layer in layers},
        plan,
        reference_rows=options["reference_rows"],
        # Medians come from all reference tokens whatever the cap on references, so that a token
        # is massive or not regardless of it.
        median_rows=_reference_rows(labels, None, 0),
        query_rows=query_rows,
        labels={
            "groups": exclusion_groups(labels, options["exclude"]),
            "folds": fold,
            "token_ids": labels["token_id"],
            "documents": labels["document"],
        },
        model=model if any(c.name == "self_only" for c in classes) else None,
    )
    variables = {}
    for name, (dims, dtype) in layer_fits.VARIABLES.items():
        if name not in KEEP or name in options["keep"]:
            variables[name] = dims, graph.array(name, dims, dtype)
    coords: dict[str, Any] = {
        "model": activations["model"].values,
        "function_class": np.array([c.label for c in classes]),
        "layer": np.array(layers, dtype=activations["layer"].dtype),
        "token": activations["token"].values[query_rows],
        **{name: ("token", labels[name][query_rows]) for name in TOKEN_COORDS},
    }
    if "depth" in activations.coords:
        depth = activations["depth"].values
        coords["depth"] = "layer", depth[[position[layer] for layer in layers]]
    ridges = [f"{c.label}: {c['ridge']}" for c in classes if c["ridge"] is not None]
    attrs = {name: value for name, value in activations.attrs.items() if name != "settings"}
    attrs["ridge"] = ", ".join(ridges)
    attrs["k"] = int(options["k"])
    for name in ("metric", "exclude", "target", "tokens"):
        attrs[name] = options[name]
    return xr.Dataset(variables, coords, attrs)


def _take(hidden: xr.DataArray, rows: np.ndarray) -> xr.DataArray:
    """Some tokens; a run of neighbouring rows as a slice, which keeps the graph small."""
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return hidden.isel(token=slice(int(rows[0]), int(rows[-1]) + 1))
    return hidden.isel(token=rows)


def _run_length(activations: xr.Dataset, rows: np.ndarray) -> int:
    """Tokens per chunk: whole windows, at most the source's chunk, at least eight runs' worth."""
    sequences = activations["sequence"].values[rows]
    window = int(np.unique(sequences, return_counts=True)[1].max())
    chunks = activations["hidden"].variable.chunksizes.get("token", (rows.size,))
    most = max(int(max(chunks)), window)
    # Small data are still cut for parallel work, but not below what pays a task's overhead.
    wanted = min(most, max(rows.size // 8, 1024))
    return max(wanted // window, 1) * window
