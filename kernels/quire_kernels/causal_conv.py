"""Short causal convolution of each channel over the tokens of a sequence, as in Mamba (Gu & Dao 2023,
https://arxiv.org/abs/2312.00752, section 3.4), with the last inputs in a cache (`states.py`)."""

import torch
import torch.nn.functional as F

from quire_kernels.activation import ACTIVATIONS
from quire_kernels.cpu import check_tensor, launch, library_for, pointer, structure, uses_triton, with_dense_rows
from quire_kernels.states import StateRows, block_stride, step_of

CONV_ACTIVATIONS = ("none", "silu")

_CausalConvCall = structure("CausalConvCall")


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
    state; in the target block those of the last R rows, too. Raises TypeError or ValueError if a tensor does not fit
    the others.

    Args:
        x_TC: rows may be parts of longer ones.
        weight_CK: float32, as is the bias; any strides.
        bias_C: None: there is none.
        ring_NRC: float32; R is at least K - 1, and as many more as a step may have drafts.
        rows: of the step.
        activation: one of `CONV_ACTIVATIONS`.
    """
    channels, width = weight_CK.shape
    size = ring_NRC.shape[1]
    if activation not in CONV_ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(CONV_ACTIVATIONS)}")
    if x_TC.shape[1:] != (channels,):
        raise ValueError(f"x_TC has shape {list(x_TC.shape)}; its rows must be {channels} channels, as weight_CK has")
    if size < width - 1:
        raise ValueError(f"the ring has {size} rows; a kernel of {width} needs {width - 1}")
    if uses_triton(x_TC):
        from quire_kernels.gpu import causal_conv as gpu

        return gpu.causal_conv(with_dense_rows(x_TC), weight_CK, bias_C, ring_NRC, rows, activation)
    if library_for(x_TC) is None:
        return _causal_conv_torch(x_TC, weight_CK, bias_C, ring_NRC, rows, activation)
    x_TC, out_TC = with_dense_rows(x_TC), torch.empty(x_TC.shape, dtype=x_TC.dtype)
    if weight_CK.dtype != torch.float32:
        raise TypeError(f"weight_CK is {weight_CK.dtype}; it must be torch.float32")
    if bias_C is not None:
        check_tensor("bias_C", bias_C, torch.float32, channels)
    call = _CausalConvCall(
        x=x_TC.data_ptr(), x_stride=x_TC.stride(0), weight=weight_CK.data_ptr(),
        weight_channel_stride=weight_CK.stride(0), weight_tap_stride=weight_CK.stride(1), bias=pointer(bias_C),
        ring=ring_NRC.data_ptr(), ring_stride=block_stride("ring_NRC", ring_NRC, size, channels),
        out=out_TC.data_ptr(), channels=channels, width=width, ring_size=size,
        activation=ACTIVATIONS.get(activation, 0), is_float=x_TC.dtype == torch.float32,
        step=step_of(rows, len(x_TC)), rows=len(x_TC),
    )  # fmt: skip
    launch("quire_causal_conv", call)
    return out_TC


def _causal_conv_torch(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_NRC: torch.Tensor,
    rows: StateRows,
    activation: str,
) -> torch.Tensor:
    out_TC, size, width = torch.empty_like(x_TC), ring_NRC.shape[1], weight_CK.shape[1]
    for one in rows.sequences():
        before = max(one.first - one.num_replayed - width + 1, 0)  # of what the ring of the source has, the oldest
        old = [ring_NRC[one.source, position % size] for position in range(before, one.first)]
        inputs = torch.cat([*(row[None] for row in old), x_TC[one.start : one.end].float()])
        padded = F.pad(inputs, (0, 0, max(width - 1 - len(old), 0), 0))[-(one.end - one.start) - width + 1 :]
        sums = (padded.unfold(0, width, 1) * weight_CK).sum(-1)
        sums = sums if bias_C is None else sums + bias_C
        for row, total in enumerate(sums, one.start):  # not at once: the bits would depend on the number of rows
            out_TC[row] = F.silu(total) if activation == "silu" else total
        end = one.first + one.end - one.start
        for length, block in [*one.stores, (0, one.target)]:
            last = one.first - one.num_replayed + length if length else end
            first = max(last - width + 1, before) if length else max(end - size, before)
            for position in range(first, last):
                ring_NRC[block, position % size] = inputs[position - before]
    return out_TC
