"""How far is the output of a patched model from that of the clean one?

``KL(p || q) = sum p (z_p - z_q) - lse(z_p) + lse(z_q)`` of the logits z, in float64: the floor
of float32 log-probabilities, near 1e-8, would hide small damage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

# name -> (long name, units), of what is measured on logits
OUTPUT_MEASURES = {
    "kl": ("KL divergence of the patched from the clean output", "nat"),
    "top1_changed": ("whether the most likely next token changed", ""),
    "loss_change": ("change of the loss of the next token", "nat"),
    "reverse_kl": ("KL divergence of the clean from the patched output", "nat"),
    "js": ("Jensen-Shannon divergence of the patched and the clean output", "nat"),
    "logit_l2": ("distance of patched and clean logits, each less its mean", ""),
    "logit_cosine": ("cosine of patched and clean logits, each less its mean", ""),
    "rank_top1": ("rank of the most likely clean token in the patched output, 1 first", ""),
}
# the same for what is measured on the state after the final norm
STATE_MEASURES = {
    "state_distance": ("distance of the patched and the clean final state", ""),
    "state_cosine": ("cosine of the patched and the clean final state", ""),
}
MEASURES = ("kl", "top1_changed", "loss_change")
HEADLESS_MEASURES = tuple(STATE_MEASURES)
BLOCK_ELEMENTS = 1 << 17  # logits treated at once: a megabyte in float64 stays in the cache


class Clean(NamedTuple):
    """Clean output at some rows, kept while they are compared with patched ones."""

    logits: torch.Tensor
    probability: torch.Tensor
    log_sum: torch.Tensor
    mean_logit: torch.Tensor  # under the clean output: sum p z
    top: torch.Tensor
    target: torch.Tensor


def clean_output(logits: torch.Tensor, target: torch.Tensor) -> Clean:
    """Prepare the clean output for comparison.

    Parameters
    ----------
    logits : torch.Tensor, shape (row, vocabulary)
    target : torch.Tensor of int, shape (row,)
        Next tokens; -1 where there is none.

    Returns
    -------
    Clean
    """
    probability = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    log_sum = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
    mean_logit = torch.empty_like(log_sum)
    for rows in _blocks(logits):
        wide = logits[rows].double()
        p = probability[rows]
        log_sum[rows] = _exponentials(wide, p)
        p /= p.sum(-1, keepdim=True)
        mean_logit[rows] = _dot(p, wide)
    target = target.to(logits.device)
    return Clean(logits, probability, log_sum, mean_logit, logits.argmax(-1), target)


def compare_outputs(
    clean: Clean, patched: torch.Tensor, measures: Sequence[str] = MEASURES
) -> dict[str, torch.Tensor]:
    """Compare patched logits with the clean ones, row by row.

    Parameters
    ----------
    clean : Clean
        From :func:`clean_output`, n rows.
    patched : torch.Tensor, shape (n, vocabulary)
        Patched logits of the same rows.
    measures : sequence of str
        Among ``OUTPUT_MEASURES``.

    Returns
    -------
    dict of torch.Tensor of float64, shape (n,)
        ``kl``, ``reverse_kl`` and ``js`` (nats, never negative), ``top1_changed`` (0 or 1),
        ``loss_change`` (nats; NaN without a next token), ``logit_l2`` and ``logit_cosine`` of the
        logits less their mean (a constant added to all logits changes no output), ``rank_top1``.

    Examples
    --------
    >>> z = torch.tensor([[0.0, 1.0, 2.0]])
    >>> same = compare_outputs(clean_output(z, torch.tensor([2])), z + 5.0)
    >>> [round(float(same[name]), 9) + 0.0 for name in MEASURES]
    [0.0, 0.0, 0.0]
    """
    out = {name: torch.full_like(clean.log_sum, torch.nan) for name in measures}
    work = torch.empty(
        (_step(patched), patched.shape[-1]), dtype=torch.float64, device=patched.device
    )
    for rows in _blocks(patched):
        part = Clean(*(values[rows] for values in clean))
        wide = patched[rows].double()
        for name, values in _compare(part, patched[rows], wide, work[: len(wide)], measures):
            out[name][rows] = values
    return out


def _compare(
    clean: Clean,
    patched: torch.Tensor,
    wide: torch.Tensor,
    work: torch.Tensor,
    measures: Sequence[str],
):
    """Yield (measure, values) of one block of rows; ``work`` is scratch of its shape."""
    if {"kl", "loss_change", "reverse_kl", "js"} & set(measures):
        log_sum = _exponentials(wide, work)
    if "kl" in measures:
        cross = clean.mean_logit - _dot(clean.probability, wide)
        yield "kl", (cross - clean.log_sum + log_sum).clamp_min(0)
    if "loss_change" in measures:
        target = clean.target.clamp_min(0)[:, None]
        loss = log_sum - wide.gather(1, target)[:, 0]
        before = clean.log_sum - clean.logits.gather(1, target)[:, 0].double()
        yield "loss_change", torch.where(clean.target >= 0, loss - before, torch.nan)
    if {"reverse_kl", "js"} & set(measures):
        q = work.div_(work.sum(-1, keepdim=True))
        before = clean.logits.double()
        if "reverse_kl" in measures:
            cross = _dot(q, wide) - _dot(q, before)
            yield "reverse_kl", (cross - log_sum + clean.log_sum).clamp_min(0)
        if "js" in measures:
            yield "js", _jensen_shannon(clean, before, q, wide, log_sum)
    if "top1_changed" in measures:
        yield "top1_changed", (patched.argmax(-1) != clean.top).double()
    if "rank_top1" in measures:
        former = patched.gather(1, clean.top[:, None])
        yield "rank_top1", 1.0 + (patched > former).sum(-1).double()
    if {"logit_l2", "logit_cosine"} & set(measures):
        a = clean.logits.double()
        a, b = a - a.mean(-1, keepdim=True), wide - wide.mean(-1, keepdim=True)
        if "logit_l2" in measures:
            yield "logit_l2", (a - b).norm(dim=-1)
        if "logit_cosine" in measures:
            yield "logit_cosine", _dot(a, b) / (a.norm(dim=-1) * b.norm(dim=-1))


def compare_states(
    clean: torch.Tensor, patched: torch.Tensor, measures: Sequence[str] = HEADLESS_MEASURES
) -> dict[str, torch.Tensor]:
    """Compare patched final states with the clean ones, row by row.

    Parameters
    ----------
    clean, patched : torch.Tensor, shape (n, width)
    measures : sequence of str
        Among ``STATE_MEASURES``.

    Returns
    -------
    dict of torch.Tensor of float64, shape (n,)

    Examples
    --------
    >>> a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    >>> {name: float(value) for name, value in compare_states(a, b).items()}
    {'state_distance': 5.0, 'state_cosine': 0.0}
    """
    a, b = clean.double(), patched.double()
    out = {}
    if "state_distance" in measures:
        out["state_distance"] = (a - b).norm(dim=-1)
    if "state_cosine" in measures:
        out["state_cosine"] = _dot(a, b) / (a.norm(dim=-1) * b.norm(dim=-1))
    return out


def take_rows(clean: Clean, rows: torch.Tensor) -> Clean:
    """The clean output at chosen rows."""
    return Clean(*(part[rows.to(part.device)] for part in clean))


def _exponentials(wide: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp of each row; ``exp(wide - its maximum)`` is left in ``out``."""
    top = wide.amax(-1, keepdim=True)
    torch.sub(wide, top, out=out).exp_()
    return out.sum(-1).log_().add_(top[:, 0])


def _jensen_shannon(
    clean: Clean, before: torch.Tensor, q: torch.Tensor, wide: torch.Tensor, log_sum: torch.Tensor
) -> torch.Tensor:
    """``(KL(p || m) + KL(q || m)) / 2`` with m the mean of p and q."""
    log_p, log_q = before - clean.log_sum[:, None], wide - log_sum[:, None]
    log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    both = _dot(clean.probability, log_p - log_m) + _dot(q, log_q - log_m)
    return (both / 2).clamp_min(0)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum("rv,rv->r", a, b)


def _step(logits: torch.Tensor) -> int:
    return max(1, BLOCK_ELEMENTS // logits.shape[-1])


def _blocks(logits: torch.Tensor) -> list[slice]:
    step = _step(logits)
    return [slice(i, min(i + step, len(logits))) for i in range(0, len(logits), step)]
