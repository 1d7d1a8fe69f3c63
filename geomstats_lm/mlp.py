"""How well does a small network, trained once per layer, predict the update?

``G(x) = s (W_2 gelu(W_1 z + b_1) + b_2)`` with z the standardized state and s the spread of the
targets; trained by Adam on reference documents, stopped early by the error on some of them.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from geomstats_lm.neighbours import one_thread

HELD_OUT = 0.15  # share of the reference documents that decides when to stop
PATIENCE = 6  # epochs without improvement
BATCH = 256
MOST_STEPS = 4000
ENOUGH = 1e-3  # relative improvement that counts as one


class Network(NamedTuple):
    """A fitted network and how its training went."""

    mean: np.ndarray  # (d,) of states
    inverse_sd: np.ndarray  # (d,)
    shift: np.ndarray  # (d,) mean of targets
    spread: float  # root mean square of targets about it
    weights: tuple[np.ndarray, ...]  # W_1 (hidden, d), b_1, W_2 (d, hidden), b_2
    converged: bool
    epochs: int
    history: np.ndarray  # held-out mean squared error per epoch, in units of spread^2


def fit(
    states: np.ndarray,
    targets: np.ndarray,
    documents: np.ndarray,
    *,
    hidden: int,
    seed: Any,
    most_steps: int | None = None,
) -> Network:
    """Train on reference tokens.

    Parameters
    ----------
    states, targets : numpy.ndarray of float32, shape (N, d)
        Raw states, and updates or next states.
    documents : numpy.ndarray of int, shape (N,)
        Whole documents are held out for stopping.
    hidden : int
        Width of the hidden layer.
    seed : int or sequence of int
        Of the weights, the order of batches and the documents held out.
    most_steps : int, optional
        Training that still improves after so many (4000 by default) is declared not
        converged, with a warning.

    Returns
    -------
    Network

    Raises
    ------
    ValueError
        If there are fewer than two documents.
    """
    import torch

    rng = np.random.default_rng(seed)
    names = np.unique(documents)
    if len(names) < 2:
        raise ValueError("mlp: early stopping needs reference tokens of at least 2 documents")
    apart = rng.permutation(names)[: max(1, round(HELD_OUT * len(names)))]
    held = np.isin(documents, apart)
    mean = states[~held].mean(0, dtype=np.float64).astype(np.float32)
    sd = states[~held].std(0, dtype=np.float64)
    inverse_sd = np.where(sd > 0, 1 / np.where(sd > 0, sd, 1), 0).astype(np.float32)
    shift = targets[~held].mean(0, dtype=np.float64).astype(np.float32)
    spread = float(np.sqrt(np.mean((targets[~held] - shift) ** 2, dtype=np.float64))) or 1.0
    d = states.shape[1]
    limit = 1 / np.sqrt(d)
    # Begins as the mean update; no global random state, which other threads would share.
    begin = [
        rng.uniform(-limit, limit, (hidden, d)), rng.uniform(-limit, limit, hidden),
        np.zeros((d, hidden)), np.zeros(d),
    ]  # fmt: skip
    x = torch.from_numpy((states - mean) * inverse_sd)
    y = torch.from_numpy((targets - shift) / np.float32(spread))
    inside, outside = torch.from_numpy(~held), torch.from_numpy(held)
    with one_thread():
        weights = [torch.tensor(w, dtype=torch.float32, requires_grad=True) for w in begin]
        history, best, converged, epochs = _train(
            weights, x[inside], y[inside], x[outside], y[outside], rng, most_steps or MOST_STEPS
        )
    if not converged:
        warnings.warn(
            f"mlp with {hidden} hidden units still improved after {epochs} epochs on "
            f"{int((~held).sum())} tokens: it has not converged",
            UserWarning, stacklevel=2,
        )  # fmt: skip
    return Network(mean, inverse_sd, shift, spread, best, converged, epochs, history)


def _train(
    weights: list[Any],
    x: Any,
    y: Any,
    x_held: Any,
    y_held: Any,
    rng: np.random.Generator,
    most: int,
) -> tuple[np.ndarray, tuple[np.ndarray, ...], bool, int]:
    """Adam with a rate halved on every plateau; the best weights on the held-out documents."""
    import torch

    optimizer = torch.optim.Adam(weights, lr=3e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    history: list[float] = []
    best, kept, since = np.inf, _copies(weights), 0
    for _ in range(-(-most // -(-len(x) // BATCH))):
        order = torch.from_numpy(rng.permutation(len(x)))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(_forward(weights, x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            error = float(torch.nn.functional.mse_loss(_forward(weights, x_held), y_held))
        history.append(error)
        schedule.step(error)
        if error < best * (1 - ENOUGH):
            best, kept, since = error, _copies(weights), 0
        else:
            since += 1
            if since >= PATIENCE:
                return np.array(history), kept, True, len(history)
    return np.array(history), kept, False, len(history)


def _forward(weights: Any, z: Any) -> Any:
    import torch

    first, first_bias, second, second_bias = weights
    inner = torch.nn.functional.gelu(torch.addmm(first_bias, z, first.T))
    return torch.addmm(second_bias, inner, second.T)


def _copies(weights: list[Any]) -> tuple[np.ndarray, ...]:
    return tuple(w.detach().numpy().copy() for w in weights)


def predict(network: Network, states: np.ndarray) -> np.ndarray:
    """Predicted targets of raw float32 states (n, d)."""
    import torch

    with one_thread(), torch.no_grad():
        weights = [torch.from_numpy(w) for w in network.weights]
        z = torch.from_numpy((states - network.mean) * network.inverse_sd)
        out = _forward(weights, z).numpy()
    return out * np.float32(network.spread) + network.shift
