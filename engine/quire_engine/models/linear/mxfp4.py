"""Weights of four bits whose blocks share an exponent (OCP Microscaling Formats 1.0, sections 5.2 and 6.3)::

blocks   [N, K / 32, 16]   bytes of two numbers, the lower bits first
scales   [N, K / 32]       exponents of 2, from -127 on
"""

import torch

from quire_engine.models.checkpoints import StoredTensor
from quire_engine.models.linear.base import DequantizedMethod
from quire_engine.models.weight_format import MXFP4_BLOCK

FP4 = torch.tensor([sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""The numbers of four bits: a sign, two bits of exponent and one of mantissa."""
PAIRS = torch.stack((FP4.repeat(16), FP4.repeat_interleave(16)), dim=1).view(torch.int64).flatten()
"""By byte, the two numbers in it, in float32, as one: 4 million bytes are looked up in 2 ms so, and in 48 as pairs."""
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""By byte, the power of 2 that it is as a scale."""


def dequantize_mxfp4(blocks_NGB: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits times the powers of 2 of their blocks: [N, G * 2 * B] float32, exact.

    A scale of 255 is no number in the specification; here, too, none of its block is finite.
    """
    pairs = PAIRS.index_select(0, blocks_NGB.flatten().int())
    numbers = pairs.view(torch.float32).view(*scales_NG.shape, -1)
    return numbers.mul_(POWERS[scales_NG.int()].unsqueeze(-1)).flatten(1)


class Mxfp4(DequantizedMethod):
    """The blocks are the weight, and the scales its companion; see `checkpoints/parts.py`."""

    def dequantize(self, tensor: StoredTensor, rows: slice, columns: slice) -> torch.Tensor:
        reader, first, end = tensor.reader, columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK)
        blocks_NGB = reader.read(tensor, (rows, slice(first, end), slice(0, MXFP4_BLOCK // 2)))
        scales_NG = reader.read(tensor.companions["scales"], (rows, slice(first, end)), tensor.matrix)
        numbers_NK = dequantize_mxfp4(blocks_NGB, scales_NG)
        reader.release(blocks_NGB)
        reader.release(scales_NG)
        return numbers_NK[:, columns.start - first * MXFP4_BLOCK : columns.stop - first * MXFP4_BLOCK]
