"""How far is the output of a patched model from that of the clean one?

``KL(p || q) = sum p (z_p - z_q) - lse(z_p) + lse(z_q)`` of the logits z, in float64: the floor
of float32 log-probabilities, near 1e-8, would hide small damage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MEASURES = ("kl", "top1_changed", "loss_change")
BLOCK_ELEMENTS = 1 << 22  # logits treated at once: memory does not grow with the vocabulary


class Clean(NamedTuple):
    """Clean output at some rows, kept while they are compared with patched ones."""

    logits: torch.Tensor
    probability: torch.Tensor
    log_sum: torch.Tensor
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
    for rows in _blocks(logits):
        wide = logits[rows].double()
        log_sum[rows] = wide.logsumexp(-1)
        probability[rows] = (wide - log_sum[rows, None]).exp_()
    return Clean(logits, probability, log_sum, logits.argmax(-1), target.to(logits.device))


def compare_outputs(clean: Clean, patched: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compare patched logits with the clean ones, row by row.

    Parameters
    ----------
    clean : Clean
        From :func:`clean_output`, n rows.
    patched : torch.Tensor, shape (n, vocabulary)
        Patched logits of the same rows.

    Returns
    -------
    dict of torch.Tensor of float64, shape (n,)
        ``kl`` (nats, never negative), ``top1_changed`` (0 or 1) and ``loss_change`` (nats; NaN
        without a next token).

    Examples
    --------
    >>> z = torch.tensor([[0.0, 1.0, 2.0]])
    >>> same = compare_outputs(clean_output(z, torch.tensor([2])), z + 5.0)
    >>> [round(float(same[name]), 9) + 0.0 for name in MEASURES]
    [0.0, 0.0, 0.0]
    """
    kl = torch.empty_like(clean.log_sum)
    change = torch.full_like(clean.log_sum, torch.nan)
    has_target = clean.target >= 0
    for rows in _blocks(patched):
        wide, before = patched[rows].double(), clean.logits[rows].double()
        log_sum = wide.logsumexp(-1)
        cross = torch.einsum("rv,rv->r", clean.probability[rows], before - wide)
        kl[rows] = (cross - clean.log_sum[rows] + log_sum).clamp_min(0)
        target = clean.target[rows].clamp_min(0)[:, None]
        loss = log_sum - wide.gather(1, target)[:, 0]
        loss_before = clean.log_sum[rows] - before.gather(1, target)[:, 0]
        change[rows] = torch.where(has_target[rows], loss - loss_before, torch.nan)
    top = (patched.argmax(-1) != clean.top).double()
    return {"kl": kl, "top1_changed": top, "loss_change": change}


def take_rows(clean: Clean, rows: torch.Tensor) -> Clean:
    """The clean output at chosen rows."""
    return Clean(*(part[rows.to(part.device)] for part in clean))


def _blocks(logits: torch.Tensor) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // logits.shape[-1])
    return [slice(i, min(i + step, len(logits))) for i in range(0, len(logits), step)]
