"""A study with a planted truth, small enough to be made in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from geomstats_lm import geometry
from geomstats_lm.cube import write_leaf
from geomstats_lm.findings import Findings, ModelFindings, find_in

DIM, LAYERS, TOKENS = 8, 3, 12  # tokens a document
WORDS = ("one two three four five six seven eight nine ten eleven twelve").split()  # noqa: SIM905
ATTRS = {
    "architecture": "Planted", "n_layers": LAYERS, "model_dtype": "float32",
    "parameter_checksum": "ab" * 32, "text_checksum": "cd" * 32, "software": "planted 1",
    "tokenizer": "nowhere/at-all", "window_length": TOKENS, "k": 4,
}  # fmt: skip


NEEDED = (
    "residual_norm", "update_centred_norm", "relative_error", "angle_residual_tokenwise",
    "cos_update_tokenwise", "forced_cos_update_tokenwise", "cos_centred", "forced_cos_centred",
    "cos_next_state_tokenwise", "cos_next_state_state", "r2_centred", "explained", "n",
    "n_massive", "n_error_above_one", "energy_share_residual", "usable", "tokenwise_norm",
)  # fmt: skip


def planted_node(
    key: str = "planted",
    *,
    documents: int = 20,
    slope: float = 1.0,
    ratio: float = 2.0,
    share: float = 0.5,
    seed: int = 0,
) -> dict[str, xr.Dataset]:
    """Geometry and perturbation: KL goes as |r|^(2 slope), and is `ratio` times its control.

    The tokenwise part is uncorrelated with the residual, whose share of the centred update's
    variance is 1 - `share`.
    """
    rng = np.random.default_rng(seed)
    n = documents * TOKENS
    size = np.exp(0.5 * rng.normal(size=(LAYERS, n, 1)))
    tokenwise = rng.normal(size=(1, 1, LAYERS, n, DIM)) * np.sqrt(share)
    residual = rng.normal(size=(LAYERS, n, DIM)) * size * np.sqrt(1 - share)
    residual *= np.sqrt((1 - share) / np.mean(residual**2))
    number = np.arange(n)
    labels = {
        "model": [key],
        "layer": np.arange(1, LAYERS + 1),
        "token": number,
        "document": ("token", (number // TOKENS).astype(np.int32)),
        "sequence": ("token", (number // TOKENS).astype(np.int32)),
        "position": ("token", (number % TOKENS).astype(np.int32)),
        "token_id": ("token", (number % TOKENS).astype(np.int32)),
        "is_special": ("token", np.zeros(n, bool)),
        "char_start": ("token", np.array([len(" ".join(WORDS[:i])) + (i > 0) for i in number
                                          % TOKENS], np.int32)),
        "char_end": ("token", np.array([len(" ".join(WORDS[: i + 1])) for i in number % TOKENS],
                                       np.int32)),
    }  # fmt: skip
    dims = ("model", "layer", "token", "dim")
    update = (tokenwise[0] + residual)[...]
    parts = xr.Dataset(
        {
            "state": (dims, rng.normal(size=(1, LAYERS, n, DIM))),
            "update": (dims, update),
            "tokenwise": (("model", "function_class", *dims[1:]), tokenwise),
        },
        {**labels, "function_class": ["affine"]},
        ATTRS,
    )
    measured = geometry(parts)
    damage = np.linalg.norm(residual, axis=-1) ** (2 * slope) * rng.gamma(20, 0.05, (LAYERS, n))
    kl = np.where(labels["position"][1] > 0, damage, np.nan)[None, None, None]
    modes = np.concatenate([kl, kl], axis=2)
    # one position at a time, half of them are not sampled
    modes[:, :, 1, :, ::2] = np.nan
    shape = (1, 1, 2, 1, 1, LAYERS, n)
    control = (modes / ratio)[:, :, :, None, None].reshape(shape)
    perturbation = xr.Dataset(
        {
            "kl": (("model", "function_class", "positions", "layer", "token"), modes),
            "kl_control": (
                ("model", "function_class", "positions", "control", "draw", "layer", "token"),
                control,
            ),
            "kl_floor": (("model", "positions"), np.full((1, 2), 1e-12)),
        },
        {
            **labels, "function_class": ["affine"], "positions": ["all", "single"],
            "control": ["exchanged"],
        },
        ATTRS,
    )  # fmt: skip
    return {"geometry": measured[list(NEEDED)], "perturbation": perturbation}


def findings_of(nodes: dict[str, dict[str, xr.Dataset]]) -> Findings:
    """What a report finds in such nodes, without a store."""
    models = [ModelFindings(key, dict(leaves)) for key, leaves in nodes.items()]
    return find_in(models, n_boot=100)


def write_study(store: Path, nodes: dict[str, dict[str, xr.Dataset]]) -> Path:
    """A store of such nodes."""
    for key, leaves in nodes.items():
        for name, leaf in leaves.items():
            write_leaf(
                leaf.chunk(dict.fromkeys(leaf.dims, -1)), store, key, name,
                settings={"decomposition": {"k": 4, "target": "update", "metric": "euclidean"}},
                progress=False,
            )  # fmt: skip
    return store
