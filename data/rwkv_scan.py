"""How is RWKV's recurrence trained without a graph of one node per token?

    y_t = (A_t + e^{u + k_t} v_t) / (B_t + e^{u + k_t}),   A_{t+1} = e^w A_t + e^{k_t} v_t,
    B_{t+1} = e^w B_t + e^{k_t},                           w = -exp(time_decay)

The library's loop over tokens writes each y_t into one tensor, which autograd copies as a whole at
every step. Here the loop and its adjoint are two compiled functions, in float64 after the largest
key of a channel is taken off its keys (y does not change), so that no running maximum is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from transformers.models.rwkv import modeling_rwkv


@contextmanager
def compiled_scan() -> Iterator[None]:
    """Let the library's RWKV models use this scan while the context lasts."""
    stock = modeling_rwkv.rwkv_linear_attention
    modeling_rwkv.rwkv_linear_attention = linear_attention
    try:
        yield
    finally:
        modeling_rwkv.rwkv_linear_attention = stock


@torch.compiler.disable
def linear_attention(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, None]:
    """Return y, (batch, token, channel), for whole windows; states are not carried."""
    if state is not None or return_state:
        raise ValueError("state: this scan reads whole windows, from no state and to none")
    return _Scan.apply(time_decay, time_first, key.float(), value.float()), None


class _Scan(torch.autograd.Function):
    """The compiled loop as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        time_decay: torch.Tensor,
        time_first: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        decay = -np.exp(time_decay.detach().double().numpy())
        first = np.exp(time_first.detach().double().numpy())
        weight = torch.exp(key.double() - key.double().amax(1, keepdim=True)).numpy()
        values = value.double().numpy()
        output, numerator, denominator = _forward(np.exp(decay), first, weight, values)
        ctx.arrays = decay, first, weight, values, output, numerator, denominator
        return torch.from_numpy(output).float()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        decay, first, weight, values, output, numerator, denominator = ctx.arrays
        by_key, by_value, by_decay, by_first = _backward(
            np.exp(decay),
            first,
            weight,
            values,
            output,
            numerator,
            denominator,
            gradients[0].double().contiguous().numpy(),
        )
        # d w / d time_decay = w
        arrays = by_decay * decay, by_first, by_key, by_value
        return tuple(torch.from_numpy(array).float() for array in arrays)


@numba.njit(cache=True, fastmath=True)
def _forward(
    shrink: np.ndarray, first: np.ndarray, weight: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return y and the sums A and B that each token meets; weight is e^k."""
    batches, tokens, channels = weight.shape
    output = np.empty_like(weight)
    numerator = np.zeros_like(weight)
    denominator = np.zeros_like(weight)
    for b in range(batches):
        for t in range(tokens):
            for c in range(channels):
                a, d = numerator[b, t, c], denominator[b, t, c]
                w, v = weight[b, t, c], value[b, t, c]
                output[b, t, c] = (a + first[c] * w * v) / (d + first[c] * w)
                if t + 1 < tokens:
                    numerator[b, t + 1, c] = shrink[c] * a + w * v
                    denominator[b, t + 1, c] = shrink[c] * d + w
    return output, numerator, denominator


@numba.njit(cache=True, fastmath=True)
def _backward(
    shrink: np.ndarray,
    first: np.ndarray,
    weight: np.ndarray,
    value: np.ndarray,
    output: np.ndarray,
    numerator: np.ndarray,
    denominator: np.ndarray,
    gradient: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients by k, v, w and u, walking from the last token to the first."""
    batches, tokens, channels = weight.shape
    by_key, by_value = np.empty_like(weight), np.empty_like(weight)
    by_decay, by_first = np.zeros(channels), np.zeros(channels)
    for b in range(batches):
        by_a, by_b = np.zeros(channels), np.zeros(channels)  # by A and B after token t
        for t in range(tokens - 1, -1, -1):
            for c in range(channels):
                w, v, y = weight[b, t, c], value[b, t, c], output[b, t, c]
                g = gradient[b, t, c] / (denominator[b, t, c] + first[c] * w)
                own = first[c] * w * g
                by_key[b, t, c] = w * (v * by_a[c] + by_b[c]) + own * (v - y)
                by_value[b, t, c] = w * by_a[c] + own
                by_first[c] += own * (v - y)
                passed = numerator[b, t, c] * by_a[c] + denominator[b, t, c] * by_b[c]
                by_decay[c] += shrink[c] * passed
                by_a[c] = shrink[c] * by_a[c] + g
                by_b[c] = shrink[c] * by_b[c] - g * y
    return by_key, by_value, by_decay, by_first
