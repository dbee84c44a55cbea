"""Blocks of the quantised types of GGUF, of 32 or 256 numbers of a row, each with its scales: what is in them.

They become `quire_kernels.GroupedCodes`, whose numbers are those of llama.cpp's dequantisation, bit for bit. The layout
of each type is in https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from quire_kernels import GroupedCodes

from quire_engine.models.checkpoints.base import BAND
from quire_engine.models.checkpoints.gguf_types import BLOCKS

IQ4 = torch.tensor((1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241), dtype=torch.uint8)
"""Values of IQ4_NL and IQ4_XS, plus 128."""
FP4 = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)).add(128).to(torch.uint8)
"""Twice the values of mxfp4, plus 128."""


def _fields(data_NGB: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """The fields of some bits in bytes, [N, G, B * 8 / bits]: of each run of bytes first the lowest of all bytes."""
    each, runs = 8 // bits, data_NGB.reshape(*data_NGB.shape[:-1], -1, run)
    fields = torch.empty(*runs.shape[:-1], each, run, dtype=torch.uint8, device=data_NGB.device)
    for i in range(each):
        torch.bitwise_right_shift(runs, i * bits, out=fields[..., i, :])
    return fields.bitwise_and_((1 << bits) - 1).flatten(-3)


def _halves(data_NGB: torch.Tensor, at: int) -> torch.Tensor:
    """[N, G] float16, from a place in each block."""
    return data_NGB[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _flat(*parts_NGB: torch.Tensor) -> torch.Tensor:
    """Codes of several parts of each code, the lower bits first, of all blocks of a row."""
    codes, bits = parts_NGB[0], 4
    for part in parts_NGB[1:]:
        codes |= part.bitwise_left_shift_(bits)
    return codes.flatten(1)


def _q4_0(b: torch.Tensor) -> GroupedCodes:
    return GroupedCodes(codes=_flat(_fields(b[..., 2:], 4, 16)), bits=4, group_size=32, scales=_halves(b, 0), zero=8)


def _q4_1(b: torch.Tensor) -> GroupedCodes:
    codes = _flat(_fields(b[..., 4:], 4, 16))
    return GroupedCodes(codes=codes, bits=4, group_size=32, scales=_halves(b, 0), offsets=-_halves(b, 2))


def _q5_0(b: torch.Tensor) -> GroupedCodes:
    codes = _flat(_fields(b[..., 6:], 4, 16), _fields(b[..., 2:6], 1, 1))
    return GroupedCodes(codes=codes, bits=8, group_size=32, scales=_halves(b, 0), zero=16)


def _q5_1(b: torch.Tensor) -> GroupedCodes:
    codes = _flat(_fields(b[..., 8:], 4, 16), _fields(b[..., 4:8], 1, 1))
    return GroupedCodes(codes=codes, bits=8, group_size=32, scales=_halves(b, 0), offsets=-_halves(b, 2))


def _q8_0(b: torch.Tensor) -> GroupedCodes:
    return GroupedCodes(codes=_flat(b[..., 2:] ^ 128), bits=8, group_size=32, scales=_halves(b, 0), zero=128)


def _q2_k(b: torch.Tensor) -> GroupedCodes:
    scales = b[..., :16]
    return GroupedCodes(
        codes=_flat(_fields(b[..., 16:80], 2, 32)), bits=4, group_size=16,
        scales=(scales & 15).flatten(1).view(torch.int8), super_scales=_halves(b, 80),
        offsets=(scales >> 4).flatten(1).view(torch.int8), super_offsets=_halves(b, 82),
    )  # fmt: skip


def _q3_k(b: torch.Tensor) -> GroupedCodes:
    low, high = _fields(b[..., 32:96], 2, 32), _fields(b[..., :32], 1, 32)
    scales = _flat(_fields(b[..., 96:104], 4, 8), _fields(b[..., 104:108], 2, 4))
    return GroupedCodes(
        codes=(low | high.bitwise_left_shift_(2)).flatten(1), bits=4, group_size=16, zero=4,
        scales=scales.view(torch.int8) - 32, super_scales=_halves(b, 108),
    )  # fmt: skip


def _q4_k(b: torch.Tensor) -> GroupedCodes:
    return GroupedCodes(codes=_flat(_fields(b[..., 16:], 4, 32)), bits=4, **_k_scales(b))


def _q5_k(b: torch.Tensor) -> GroupedCodes:
    codes = _flat(_fields(b[..., 48:], 4, 32), _fields(b[..., 16:48], 1, 32))
    return GroupedCodes(codes=codes, bits=8, **_k_scales(b))


def _k_scales(b: torch.Tensor) -> dict[str, Any]:
    """Q4_K and Q5_K have scales and offsets of 6 bits, the upper 2 of the last four apart."""
    scales, offsets, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((scales & 63, (both & 15) | ((scales >> 2) & 48)), dim=-1)
    offsets = torch.cat((offsets & 63, (both >> 4) | ((offsets >> 2) & 48)), dim=-1)
    return {
        "group_size": 32, "scales": scales.flatten(1).view(torch.int8), "super_scales": _halves(b, 0),
        "offsets": offsets.flatten(1).view(torch.int8), "super_offsets": _halves(b, 2),
    }  # fmt: skip


def _q6_k(b: torch.Tensor) -> GroupedCodes:
    codes = _flat(_fields(b[..., :128], 4, 64), _fields(b[..., 128:192], 2, 32))
    return GroupedCodes(
        codes=codes, bits=8, group_size=16, scales=b[..., 192:208].flatten(1).view(torch.int8), zero=32,
        super_scales=_halves(b, 208),
    )  # fmt: skip


def _iq4_nl(b: torch.Tensor) -> GroupedCodes:
    return replace(_q4_0(b), zero=128, table=IQ4.to(b.device))


def _iq4_xs(b: torch.Tensor) -> GroupedCodes:
    scales = _flat(_fields(b[..., 4:8], 4, 1), _fields(b[..., 2:4], 2, 1))
    return GroupedCodes(
        codes=_flat(_fields(b[..., 8:], 4, 16)), bits=4, group_size=32, zero=128, table=IQ4.to(b.device),
        scales=scales.view(torch.int8) - 32, super_scales=_halves(b, 0),
    )  # fmt: skip


def _mxfp4(b: torch.Tensor) -> GroupedCodes:
    exponents = b[..., 0].short()  # of bfloat16: e - 1, and two numbers that have no such exponent
    bits = torch.where(exponents < 2, 32 << exponents.clamp(max=2), (exponents - 1) << 7)
    return GroupedCodes(
        codes=_flat(_fields(b[..., 1:], 4, 16)), bits=4, group_size=32, zero=128, table=FP4.to(b.device),
        scales=bits.short().view(torch.bfloat16),
    )  # fmt: skip


UNPACK: Mapping[str, Callable[[torch.Tensor], GroupedCodes]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
LARGEST_EXPONENT = 252
"""The exponent of mxfp4 above which numbers in float32 are not finite."""
_OF_ROWS = ("codes", "scales", "offsets", "super_scales", "super_offsets")
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has numbers of float16, which may be infinite or no numbers."""


def unpack(blocks_NB: torch.Tensor, kind: str) -> GroupedCodes:
    """Codes and scales of blocks.

    Args:
        blocks_NB: uint8, rows of whole blocks.
        kind: of `BLOCKS`.
    """
    numbers, size = BLOCKS[kind]
    bands = torch.split(blocks_NB, max(1, BAND // (blocks_NB.shape[1] // size * numbers)))
    codes = UNPACK[kind](bands[0].reshape(len(bands[0]), -1, size))
    if len(bands) == 1:
        return codes
    names = [name for name in _OF_ROWS if getattr(codes, name) is not None]
    whole = {name: getattr(codes, name).new_empty(len(blocks_NB), getattr(codes, name).shape[1]) for name in names}
    first = 0
    for band in bands:
        codes = UNPACK[kind](band.reshape(len(band), -1, size))
        for name, tensor in whole.items():
            tensor[first : first + len(band)] = getattr(codes, name)
        first += len(band)
    return replace(codes, **whole)


def with_grouped_heads(codes: GroupedCodes, each: int, size: int, num_keys: int) -> GroupedCodes:
    """Codes whose heads of columns are in order. Their groups must not be parts of two heads.

    Args:
        codes: of each block of columns those of one head of so many heads of keys, then those of the next.
        each: heads of a head of keys.
        size: columns of a head.
        num_keys: heads of keys that share a block.
    """

    def order(values_NK: torch.Tensor, unit: int) -> torch.Tensor:
        return values_NK.reshape(len(values_NK), -1, each, num_keys, unit).transpose(2, 3).flatten(1)

    offsets, groups = codes.group_offsets(), size // codes.group_size
    return replace(
        codes, codes=order(codes.codes, size), scales=order(codes.group_scales(), groups), super_scales=None,
        offsets=None if offsets is None else order(offsets, groups), super_offsets=None,
    )  # fmt: skip


def has_finite_scales(blocks_NB: torch.Tensor, kind: str) -> bool:
    """Whether all numbers in blocks are finite."""
    blocks_NGB = blocks_NB.reshape(len(blocks_NB), -1, BLOCKS[kind][1])
    if kind == "MXFP4":
        return not bool((blocks_NGB[..., 0] > LARGEST_EXPONENT).any())
    return all(bool(_halves(blocks_NGB, at).isfinite().all()) for at in HALVES[kind])


def dequantize(blocks_NB: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers in blocks, or in a tensor of another type than `BLOCKS`: [N, K] float32."""
    return unpack(blocks_NB, kind).dequantize() if kind in BLOCKS else blocks_NB.float()
