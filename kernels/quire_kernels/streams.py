"""Ops of models with several streams of hidden states (AltUp, Baykal et al. 2023, https://arxiv.org/abs/2301.13310),
and of gates that are zero but for their largest numbers, as in Gemma 3n
(https://huggingface.co/docs/transformers/model_doc/gemma3n). Letters besides the package's:

    P  streams       Q  streams that are written       M  numbers of a token that choose how streams are mixed
"""

import torch

from quire_kernels.cpu import (
    Call,
    check_tensor,
    check_written_rows,
    launch,
    library_for,
    pointer,
    structure,
    uses_triton,
    with_dense_rows,
)

_MixStreamsCall = structure("MixStreamsCall")
_MatchRmsCall = structure("MatchRmsCall")
_GaussianCall = structure("GaussianCall")


def mix_streams(
    base_TQE: torch.Tensor,
    inputs_TPE: torch.Tensor,
    routes_TM: torch.Tensor,
    weight_QPM: torch.Tensor,
    offset: float = 0.0,
) -> torch.Tensor:
    """`base_q + Σ_p c_qp · inputs_p`, [T, Q, E], where each token's c is `offset + weight_QPM · tanh(routes_M)`.

    Args:
        base_TQE: tokens may be strided.
        inputs_TPE: likewise.
        routes_TM: float32, without gaps.
        weight_QPM: likewise.
        offset: added to each coefficient.

    Raises:
        TypeError: a tensor is of another dtype or on another device.
        ValueError: a tensor is of another shape, or has gaps where it may have none.
    """
    (rows, num_outputs, size), num_inputs = base_TQE.shape, inputs_TPE.shape[1]
    if inputs_TPE.dtype != base_TQE.dtype or inputs_TPE.device != base_TQE.device:
        raise TypeError(f"inputs_TPE is {inputs_TPE.dtype} on {inputs_TPE.device}; base_TQE is {base_TQE.dtype}")
    for name, streams, number in (("base_TQE", base_TQE, num_outputs), ("inputs_TPE", inputs_TPE, num_inputs)):
        if streams.shape != (rows, number, size) or streams.stride()[1:] != (size, 1):
            raise ValueError(
                f"{name} has shape {list(streams.shape)} and strides {list(streams.stride())}; it must be {rows} "
                f"tokens of streams of {size}, without gaps between these"
            )
    routes_size = routes_TM.shape[-1]
    if uses_triton(base_TQE):
        from quire_kernels.gpu import streams as gpu

        return gpu.mix_streams(base_TQE, inputs_TPE, routes_TM, weight_QPM, offset)
    if library_for(base_TQE, inputs_TPE) is None:
        c_TQP = torch.einsum("tm,qpm->tqp", routes_TM.tanh(), weight_QPM) + offset
        return (base_TQE.float() + c_TQP @ inputs_TPE.float()).to(base_TQE.dtype)
    check_tensor("routes_TM", routes_TM, torch.float32, rows, routes_size)
    check_tensor("weight_QPM", weight_QPM, torch.float32, num_outputs, num_inputs, routes_size)
    out_TQE = torch.empty(rows, num_outputs, size, dtype=base_TQE.dtype)
    call = _MixStreamsCall(
        base_TQE.data_ptr(), base_TQE.stride(0), inputs_TPE.data_ptr(), inputs_TPE.stride(0), routes_TM.data_ptr(),
        weight_QPM.data_ptr(), out_TQE.data_ptr(), rows, num_outputs, num_inputs, routes_size, size, offset,
        base_TQE.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_mix_streams", call)
    return out_TQE


def match_rms(
    hidden_TE: torch.Tensor, like_TE: torch.Tensor, floor: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row times `rms(like) / rms(hidden)`, [T, E], so that it has the root mean square of the same row of
    `like_TE`. The mean square that divides is at least `floor`. Rows may be strided.

    Raises:
        TypeError: a tensor is of another dtype or on another device.
        ValueError: a tensor is of another shape, or `out` has gaps between the elements of a row.
    """
    if like_TE.dtype != hidden_TE.dtype or like_TE.device != hidden_TE.device:
        raise TypeError(f"like_TE is {like_TE.dtype} on {like_TE.device}; hidden_TE is {hidden_TE.dtype}")
    if like_TE.shape != hidden_TE.shape:
        raise ValueError(f"like_TE has shape {list(like_TE.shape)}; it must be {list(hidden_TE.shape)}")
    if out is None:
        out = hidden_TE.new_empty(hidden_TE.shape)
    elif len(out) != len(hidden_TE):
        raise ValueError(f"out has {len(out)} rows; it must have {len(hidden_TE)}")
    check_written_rows("out", out, hidden_TE)
    if uses_triton(hidden_TE):
        from quire_kernels.gpu import streams as gpu

        return gpu.match_rms(with_dense_rows(hidden_TE), with_dense_rows(like_TE), floor, out)
    if library_for(hidden_TE) is None:
        own, wanted = (x.float().square().mean(-1, keepdim=True) for x in (hidden_TE, like_TE))
        return out.copy_(hidden_TE.float() * (wanted.sqrt() / own.clamp(min=floor).sqrt()))
    hidden_TE, like_TE = with_dense_rows(hidden_TE), with_dense_rows(like_TE)
    rows, size = hidden_TE.shape
    call = _MatchRmsCall(
        hidden_TE.data_ptr(), hidden_TE.stride(0), like_TE.data_ptr(), like_TE.stride(0), out.data_ptr(), out.stride(0),
        rows, size, floor, hidden_TE.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_match_rms", call)
    return out


def row_moments(x_TI: torch.Tensor) -> torch.Tensor:
    """Mean and variance of each row, whose squares are divided by their number: [T, 2] float32. Rows may be strided."""
    if uses_triton(x_TI):
        from quire_kernels.gpu import streams as gpu

        return gpu.row_moments(with_dense_rows(x_TI))
    if library_for(x_TI) is None:
        mean_T1 = x_TI.float().mean(-1, keepdim=True)
        return torch.cat((mean_T1, (x_TI.float() - mean_T1).square().mean(-1, keepdim=True)), -1)
    x_TI = with_dense_rows(x_TI)
    moments_T2 = torch.empty(len(x_TI), 2, dtype=torch.float32)
    launch("quire_row_moments", _gaussian_call(x_TI, moments_T2, None, 0.0))
    return moments_T2


def gaussian_topk(x_TI: torch.Tensor, moments_T2: torch.Tensor, multiplier: float) -> torch.Tensor:
    """`relu(x - (mean + multiplier · standard deviation))`, [T, I]: of numbers that are normally distributed, it leaves
    about as many of a row as the multiplier says. Raises TypeError or ValueError if the moments do not fit.

    Args:
        x_TI: rows may be strided.
        moments_T2: float32, from `row_moments`; of longer rows, of which x is a part, if several ranks have one each.
        multiplier: the quantile of the standard normal distribution that becomes zero.
    """
    if moments_T2.dtype != torch.float32 or moments_T2.device != x_TI.device:
        raise TypeError(f"moments_T2 is {moments_T2.dtype} on {moments_T2.device}; it must be float32 on {x_TI.device}")
    if moments_T2.shape != (len(x_TI), 2):
        raise ValueError(f"moments_T2 has shape {list(moments_T2.shape)}; it must be [{len(x_TI)}, 2]")
    if uses_triton(x_TI):
        from quire_kernels.gpu import streams as gpu

        return gpu.gaussian_topk(with_dense_rows(x_TI), moments_T2.contiguous(), multiplier)
    if library_for(x_TI) is None:
        mean_T1, variance_T1 = torch.split(moments_T2, 1, -1)
        return (x_TI.float() - (mean_T1 + multiplier * variance_T1.sqrt())).relu_().to(x_TI.dtype)
    x_TI, moments_T2 = with_dense_rows(x_TI), moments_T2.contiguous()
    out_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype)
    launch("quire_gaussian_topk", _gaussian_call(x_TI, moments_T2, out_TI, multiplier))
    return out_TI


def _gaussian_call(
    x_TI: torch.Tensor, moments_T2: torch.Tensor, out_TI: torch.Tensor | None, multiplier: float
) -> Call:
    rows, size = x_TI.shape
    return _GaussianCall(
        x_TI.data_ptr(), x_TI.stride(0), moments_T2.data_ptr(), pointer(out_TI), rows, size, multiplier,
        x_TI.dtype == torch.float32,
    )  # fmt: skip
