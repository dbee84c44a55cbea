"""Quantises a weight to codes of 4 bits, with a search for the scale of each group."""

import torch

from quire_kernels.cpu import launch, library_for, pointer, structure, with_dense_rows
from quire_kernels.grouped import GROUP_SIZES, GroupedCodes

ZERO = 8
STEPS = sorted(range(-9, 10), key=abs)
"""Of the grid, 0.1 each, around the factor that gives a group's largest number the code 0; the first of equals wins."""
BAND = 1 << 20
"""Numbers that plain torch quantises at a time, so that temporaries are small compared with the weight."""
LARGEST_SCALE = torch.finfo(torch.float16).max

_GroupSearchCall = structure("GroupSearchCall")


def quantize_grouped(
    weight_NK: torch.Tensor, group_size: int, importance_K: torch.Tensor | None = None
) -> GroupedCodes:
    """Quantise a weight to 4 bits, symmetrically: `w = scale · (code - 8)`.

    Of a grid of scales around `largest / 8`, each group has the one with the least squared error, as llama.cpp's
    `make_qx_quants` finds it. Scales are rounded so that float16 and bfloat16 both hold them.

    Args:
        weight_NK: of finite numbers.
        group_size: one of `GROUP_SIZES`; divides K.
        importance_K: float32, at least 0, by which squared errors count; None: all alike.

    Raises:
        ValueError: the size does not divide K, or `importance_K` has another shape.
    """
    rows, columns = weight_NK.shape
    if group_size not in GROUP_SIZES or columns % group_size:
        raise ValueError(f"group_size is {group_size} of {columns} columns; it must divide them: {GROUP_SIZES}")
    if importance_K is not None:
        if importance_K.shape != (columns,):
            raise ValueError(f"importance_K has shape {list(importance_K.shape)}; it must be [{columns}]")
        importance_K = importance_K.float().contiguous()
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight_NK.device)
    scales = torch.empty(rows, columns // group_size, dtype=torch.float32, device=weight_NK.device)
    handle = library_for(weight_NK)
    if handle is not None:
        weight_NK = with_dense_rows(weight_NK)
        launch(handle.quire_quantize_groups, _GroupSearchCall(
            weight_NK.data_ptr(), weight_NK.stride(0), pointer(importance_K), codes.data_ptr(), scales.data_ptr(), rows,
            columns, group_size, weight_NK.dtype == torch.float32,
        ))  # fmt: skip
    else:
        height = max(1, BAND // columns)
        for first in range(0, rows, height):
            band = slice(first, first + height)
            codes[band], scales[band] = _quantize_torch(weight_NK[band].float(), group_size, importance_K)
    scales = scales.clamp_(-LARGEST_SCALE, LARGEST_SCALE).to(torch.float16)
    return GroupedCodes(codes=codes, bits=4, group_size=group_size, scales=scales, zero=ZERO)


def _quantize_torch(
    weight_NK: torch.Tensor, group_size: int, importance_K: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.unflatten(weight_NK, 1, (-1, group_size))
    weights = x.new_ones(()) if importance_K is None else importance_K.view(-1, group_size)
    highest, lowest = x.amax(2, keepdim=True), x.amin(2, keepdim=True)
    extreme = torch.where(highest >= -lowest, highest, lowest)
    relative = torch.where(extreme == 0, 0.0, x / extreme)
    best, best_scale = torch.zeros_like(extreme), torch.full_like(extreme, -1 / ZERO)
    for step in STEPS:
        code = (relative * (-ZERO - 0.1 * step)).round_().clamp_(-ZERO, ZERO - 1)
        product = (weights * code * relative).sum(2, keepdim=True)
        square = (weights * code * code).sum(2, keepdim=True)
        is_better = product * product > best * square
        best = torch.where(is_better, product * product / square, best)
        best_scale = torch.where(is_better, product / square, best_scale)
    scale = (extreme * best_scale).bfloat16().float()
    code = torch.where(scale == 0, 0.0, x / scale).round_().clamp_(-ZERO, ZERO - 1)
    return (code + ZERO).to(torch.uint8).flatten(1), scale.squeeze(2)
