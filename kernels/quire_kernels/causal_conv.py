"""Short causal convolution of each channel over the tokens of a sequence, as in Mamba (Gu & Dao 2023,
https://arxiv.org/abs/2312.00752, section 3.4), with the last inputs in a cache (`states.py`)."""

import torch
import torch.nn.functional as F

from quire_kernels.states import StateRows

CONV_ACTIVATIONS = ("none", "silu")


def causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_NRC: torch.Tensor,
    rows: StateRows,
    activation: str = "silu",
) -> torch.Tensor:
    """`activation(bias + Σ_k weight[:, k] · x[t - K + 1 + k])` of each row, with zeros before a sequence, [T, C].

    The sums are float32, and rounded once. In the blocks of the stores, the ring gets the K - 1 inputs before the
    state; in the target block those of the last R rows, too.

    Args:
        x_TC: rows may be parts of longer ones.
        weight_CK: float32, as is the bias.
        bias_C: None: there is none.
        ring_NRC: float32; R is at least K - 1, and as many more as a step may have drafts.
        rows: of the step.
        activation: one of `CONV_ACTIVATIONS`.
    """
    out_TC, size, width = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device), *_sizes(weight_CK, ring_NRC)
    for one in rows.sequences():
        before = max(one.first - one.num_replayed - width + 1, 0)  # of what the ring of the source has, the oldest
        old = [ring_NRC[one.source, position % size] for position in range(before, one.first)]
        inputs = torch.cat([*(row[None] for row in old), x_TC[one.start : one.end].float()])
        padded = F.pad(inputs, (0, 0, max(width - 1 - len(old), 0), 0))[-(one.end - one.start) - width + 1 :]
        sums = (padded.unfold(0, width, 1) * weight_CK).sum(-1)
        sums = sums if bias_C is None else sums + bias_C
        out_TC[one.start : one.end] = (F.silu(sums) if activation == "silu" else sums).to(out_TC.dtype)
        end = one.first + one.end - one.start
        for length, block in [*one.stores, (0, one.target)]:
            last = one.first - one.num_replayed + length if length else end
            first = max(last - width + 1, before) if length else max(end - size, before)
            for position in range(first, last):
                ring_NRC[block, position % size] = inputs[position - before]
    return out_TC


def _sizes(weight_CK: torch.Tensor, ring_NRC: torch.Tensor) -> tuple[int, int]:
    if ring_NRC.shape[1] < weight_CK.shape[1] - 1:
        raise ValueError(
            f"the ring has {ring_NRC.shape[1]} rows; a kernel of {weight_CK.shape[1]} needs {weight_CK.shape[1] - 1}"
        )
    return ring_NRC.shape[1], weight_CK.shape[1]
