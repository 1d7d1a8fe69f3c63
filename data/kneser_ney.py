"""How well does a trigram model without a neural network predict the same tokens?

    p(w | u v) = max(c(u v w) - D(c), 0) / c(u v .) + gamma(u v) p(w | v)

Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1999, equations 23 to 27): three
discounts per order, for counts of one, two, and three or more; lower orders count in how many
different contexts an n-gram was seen; the lowest order is interpolated with the uniform
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Order:
    """One order of the model: its n-grams, sorted by code, and what each context gives up."""

    codes: np.ndarray  # (n-gram,) int64, context * V + word
    counts: np.ndarray  # (n-gram,) int64
    discounts: np.ndarray  # (4,) the amount taken from counts of 0, 1, 2, and 3 or more
    contexts: np.ndarray  # (context,) int64, sorted
    totals: np.ndarray  # (context,) the sum of counts
    backoff: np.ndarray  # (context,) gamma, the mass passed on to the order below


@dataclass(frozen=True)
class KneserNey:
    """A fitted model: the orders from one word to n words, and the size of the vocabulary."""

    orders: list[Order]
    vocabulary: int
    boundary: int


def fit(documents: list[np.ndarray], vocabulary: int, boundary: int, order: int = 3) -> KneserNey:
    """Fit the model to documents of token ids.

    Parameters
    ----------
    documents : list of (token,) integer arrays
    vocabulary : number of token ids, V
    boundary : the id that stands before a document; it serves as context and is never predicted
    order : number of words in the longest n-gram

    Returns
    -------
    KneserNey

    Raises
    ------
    ValueError
        When a code of `order` ids does not fit 63 bits, or when an id lies outside 0..V-1.
    """
    if vocabulary**order >= 2**63:
        raise ValueError(f"vocabulary={vocabulary} to the power order={order} exceeds 63 bits")
    tokens = np.concatenate(documents)
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"token ids must lie in 0..{vocabulary - 1}")
    grams = np.concatenate([_codes(d, vocabulary, boundary, order) for d in documents])
    codes, counts = np.unique(grams, return_counts=True)
    orders = [_order(codes, counts, vocabulary)]
    for words in range(order - 1, 0, -1):
        # An n-gram's lower-order count is the number of different words seen before it.
        codes, counts = np.unique(codes % vocabulary**words, return_counts=True)
        orders.insert(0, _order(codes, counts, vocabulary))
    return KneserNey(orders, vocabulary, boundary)


def losses(model: KneserNey, document: np.ndarray) -> np.ndarray:
    """Return -log p of each token of a document given the tokens before it, (token,), in nats."""
    order = len(model.orders)
    codes = _codes(document, model.vocabulary, model.boundary, order)
    return -np.log(probabilities(model, codes))


def probabilities(model: KneserNey, codes: np.ndarray) -> np.ndarray:
    """Return p(last word | the words before) of n-grams coded in base V, (n-gram,)."""
    probability = np.full(len(codes), 1.0 / model.vocabulary)
    for words, order in enumerate(model.orders, start=1):
        gram = codes % model.vocabulary**words
        counts, _ = _look_up(order.codes, order.counts, gram, 0)
        totals, seen = _look_up(order.contexts, order.totals, gram // model.vocabulary, 1)
        backoff, _ = _look_up(order.contexts, order.backoff, gram // model.vocabulary, 1.0)
        kept = (counts - order.discounts[np.minimum(counts, 3)]) / totals
        # An unseen context passes everything on.
        probability = np.where(seen, kept, 0.0) + backoff * probability
    return probability


def _codes(document: np.ndarray, vocabulary: int, boundary: int, order: int) -> np.ndarray:
    """Code each token with the `order` - 1 before it as one number in base V."""
    padded = np.concatenate([np.full(order - 1, boundary), document]).astype(np.int64)
    code = np.zeros(len(document), dtype=np.int64)
    for shift in range(order):
        code = code * vocabulary + padded[shift : shift + len(document)]
    return code


def _order(codes: np.ndarray, counts: np.ndarray, vocabulary: int) -> Order:
    discounts = _discounts(counts)
    taken = discounts[np.minimum(counts, 3)]
    contexts, start = np.unique(codes // vocabulary, return_index=True)
    totals = np.add.reduceat(counts, start)
    backoff = np.add.reduceat(taken, start) / totals
    return Order(codes, counts, discounts, contexts, totals, backoff)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Chen and Goodman's equation 26: D_c = c - (c + 1) Y n_{c+1} / n_c, Y = n_1 / (n_1 + 2 n_2).

    Where the counts of counts are too sparse for it (a toy text, or the single words of a small
    vocabulary), a discount is held between 0 and its count.
    """
    n = np.array([np.sum(counts == c) for c in range(5)], dtype=float)
    y = n[1] / (n[1] + 2 * n[2]) if n[1] > 0 else 0.0
    discounts = np.zeros(4)
    for c in (1, 2, 3):
        # Without any n-gram of this count the ratio is unknown: take Y, the one-discount estimate.
        raw = c - (c + 1) * y * n[c + 1] / n[c] if n[c] > 0 else y
        discounts[c] = min(max(raw, 0.0), c)
    return discounts


def _look_up(
    keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the value of each wanted key in sorted keys, and whether it is there."""
    position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = keys[position] == wanted
    return np.where(found, values[position], missing).astype(values.dtype), found
