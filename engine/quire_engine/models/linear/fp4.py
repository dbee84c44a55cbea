"""Weights of four bits that stand for numbers of a table, in groups of columns with a scale each. They stay four bits.

::

    mxfp4           blocks [N, K / 32, 16], scales [N, K / 32]: exponents of 2, from -127 on
    nvfp4           weight [N, K / 2], weight_scale [N, K / 16] in fp8, and one more scale for all of the weight
    bitsandbytes    weight [N · K / 2, 1], absmax for each 64 numbers or so, in fp32 or quantised itself

mxfp4 (OCP Microscaling Formats 1.0, sections 5.2 and 6.3) and nvfp4 are exact. The numbers of bitsandbytes' nf4 (QLoRA,
https://arxiv.org/abs/2305.14314, appendix E) are rounded to 8 bits, as is the smallest of its fp4.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, StoredTensor
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.checkpoints.files import parse_object
from quire_engine.models.checkpoints.gguf_blocks import FP4 as E2M1
from quire_engine.models.checkpoints.gguf_blocks import LARGEST_EXPONENT
from quire_engine.models.checkpoints.weight_format import MXFP4_BLOCK, UNIT, WeightFormat
from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat, Tensors
from quire_engine.models.linear.grouped import Grouped

ZERO = 128
"""Added to the numbers of tables, which are unsigned."""
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""By byte, the power of 2 that it is as a scale; 255 is no number in the specification, and infinite here."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
TABLES = {"nf4": (127, torch.tensor(NF4)), "fp4": (120, torch.tensor([*FP4, *(-one for one in FP4)]))}
"""bitsandbytes' numbers, and what they are multiplied by before they are rounded."""
MAX_STATE_BYTES = 1 << 12
BLOCK = 64
"""Divides bitsandbytes' blocks."""
LARGEST_FACTOR = 1e34
"""The largest scale of all of a weight in nvfp4: with larger ones numbers in float32 are not finite."""
FACTOR, DIVISOR = "weight_scale_2", "weight_global_scale"
"""nvfp4's scale of all of a weight, by modelopt's name and by that of compressed-tensors."""


class Mxfp4(Grouped):
    """Experts of gpt-oss (`checkpoints/parts.py`)."""

    scale_types = ("U8",)

    def __init__(self, packing: LinearMethod) -> None:
        super().__init__(packing, 4, MXFP4_BLOCK, ZERO, E2M1)

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        if not tensor.name.endswith(("_blocks", "_scales")):
            yield from super().read(tensor, index)
            return
        rows, columns = tensor.rows_in_file(index[0].start, index[0].stop), index[1]
        if tensor.name.endswith("_scales"):
            exponents_NG = tensor.reader.read(tensor, (rows, columns))
            yield (POWERS[exponents_NG.int()] / 2).masked_fill_(exponents_NG > LARGEST_EXPONENT, math.inf)
            tensor.reader.release(exponents_NG)
            return
        size = MXFP4_BLOCK // 2
        first, end = columns.start // size, -(-columns.stop // size)
        blocks_NGB = tensor.reader.read(tensor, (rows, slice(first, end), slice(0, size)))
        yield blocks_NGB.flatten(1)[:, columns.start - first * size : columns.stop - first * size]
        tensor.reader.release(blocks_NGB)


class Nvfp4(Grouped):
    """The nvfp4 of compressed-tensors and modelopt. Scales are divided by that of all of the weight
    (compressed-tensors), or multiplied."""

    scale_types = ("F8_E4M3",)

    def __init__(self, packing: LinearMethod, divides: bool) -> None:
        super().__init__(packing, 4, UNIT, ZERO, E2M1)
        self.divides, self.whole = divides, DIVISOR if divides else FACTOR
        whole = TensorFormat(dtype=torch.float32, row_block=None, column_block=None)
        self.tensors = {**self.tensors, self.whole: whole}

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        if tensor.name.endswith(self.whole):
            scale = tensor.reader.read(tensor, ()).float().reshape(1, 1)
            if not bool((1 / scale if self.divides else scale).abs() <= LARGEST_FACTOR):
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name} is {float(scale):g}; weights must be finite numbers"
                )
            yield scale
            return
        for piece in super().read(tensor, index):
            yield piece.float() if tensor.name.endswith("weight_scale") else piece

    def pack(self, loaded: LoadedLinear) -> Any:
        return super().pack(self._scaled(loaded))

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        return super().dense(self._scaled(loaded))

    def _scaled(self, loaded: LoadedLinear) -> LoadedLinear:
        """With the product of both scales, halved as the table has twice the numbers."""
        if self.whole not in loaded.tensors:
            return loaded
        scales, whole = loaded.tensors["weight_scale"], loaded.by_row(loaded.tensors[self.whole])
        product = (scales / whole if self.divides else scales * whole) / 2
        return dataclasses.replace(loaded, tensors={"weight": loaded.tensors["weight"], "weight_scale": product})


class BitsAndBytes(Grouped):
    """The method is `nf4` or `fp4`."""

    scale_types = (*FLOATING, "U8")

    def __init__(self, packing: LinearMethod, method: str) -> None:
        self.largest, numbers = TABLES[method]
        table = ((numbers * self.largest).round() + ZERO).to(torch.uint8)
        super().__init__(packing, 4, BLOCK, ZERO, table)

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        if "state" not in tensor.companions:
            yield from super().read(tensor, index)
            return
        state = _State.of(tensor.companions["state"])
        rows, columns = tensor.rows_in_file(index[0].start, index[0].stop), index[1]
        each = state.shape[1] // (2 if tensor.name.endswith(".weight") else state.block_size)
        piece = tensor.reader.read(tensor, (slice(rows.start * each, rows.stop * each),))
        if tensor.name.endswith(".weight"):  # whose higher bits come first
            bytes_NB = piece.reshape(-1, each)[:, columns]
            yield (bytes_NB >> 4) | (bytes_NB << 4)
            tensor.reader.release(piece)
            return
        scales = piece
        if tensor.dtype == "U8":
            numbers, of_blocks = (tensor.reader.read(tensor.companions[name], ()) for name in ("quant_map", "absmax"))
            blocks = torch.arange(rows.start * each, rows.stop * each) // state.nested_block_size
            scales = numbers[piece.int()] * of_blocks[blocks] + state.offset
        places = torch.arange(columns.start, columns.stop) * BLOCK // state.block_size
        yield scales.float().reshape(-1, each)[:, places] / self.largest


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """bitsandbytes' `quant_state` of a weight."""

    shape: tuple[int, int]
    block_size: int
    """Consecutive numbers that share a scale."""
    nested_block_size: int
    """Consecutive scales that share a scale of their own."""
    offset: float
    """The offset of scales that are quantised themselves."""

    @classmethod
    def of(cls, tensor: StoredTensor) -> "_State":
        if tensor.dtype != "U8" or len(tensor.shape) != 1 or tensor.num_bytes > MAX_STATE_BYTES:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} must be JSON of at most {MAX_STATE_BYTES} bytes"
            )
        text = bytes(tensor.reader.read(tensor, ()).tolist())
        fields = Fields(tensor.path, parse_object(tensor.path, text), f"{tensor.name}.")
        block_size = fields.integer("blocksize", BLOCK, MAX_SIZE)
        shape, offset = fields.values.get("shape"), fields.values.get("nested_offset", 0.0)
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(one) is int and 0 < one <= MAX_SIZE for one in shape)
        ):
            raise fields.error("shape", "two positive integers")
        if block_size % BLOCK or shape[1] % block_size:
            raise fields.error("blocksize", f"a multiple of {BLOCK} that divides the rows of shape {shape}")
        if type(offset) not in (int, float) or not math.isfinite(offset):
            raise fields.error("nested_offset", "a finite number")
        nested = fields.integer("nested_blocksize", 1, MAX_SIZE, 1)
        return cls((shape[0], shape[1]), block_size, nested, offset)


def gather_bitsandbytes(stored: WeightFormat, tensors: Tensors) -> dict[str, StoredTensor]:
    """Weights and `weight_scale`, with the shapes that they have here."""
    ending = f".weight.quant_state.bitsandbytes__{stored.method}"
    gathered = {name: tensor for name, tensor in tensors.items() if ".weight." not in name}
    with contextlib.ExitStack() as stack:
        for name, tensor in tensors.items():
            if not name.endswith(ending):
                continue
            stack.enter_context(tensor.reader)
            module, state = name.removesuffix(ending), _State.of(tensor)
            rows, columns = state.shape
            blocks = rows * columns // state.block_size

            checked = functools.partial(_checked, tensors, tensor, module)
            weight = checked("weight", rows * columns // 2, ("U8",))
            absmax, companions = checked("weight.absmax", blocks, ("F32", "U8")), {"state": tensor}
            gathered[f"{module}.weight"] = dataclasses.replace(
                weight, shape=(rows, columns // 2), companions=companions
            )
            if absmax.dtype == "U8":
                num_nested = -(-blocks // state.nested_block_size)
                companions = {
                    **companions, "quant_map": checked("weight.nested_quant_map", 256, ("F32",)),
                    "absmax": checked("weight.nested_absmax", num_nested, ("F32",)),
                }  # fmt: skip
            gathered[f"{module}.weight_scale"] = dataclasses.replace(
                absmax, shape=(rows, columns // BLOCK), companions=companions
            )
    return gathered


def _checked(
    tensors: Tensors, state: StoredTensor, module: str, kind: str, size: int, dtypes: tuple[str, ...]
) -> StoredTensor:
    one = tensors.get(f"{module}.{kind}")
    if one is None or one.shape[:1] != (size,) or math.prod(one.shape) != size or one.dtype not in dtypes:
        found = "missing" if one is None else f"{one.dtype} of shape {one.shape}"
        raise CheckpointError(
            f"{state.path}: tensor {module}.{kind} is {found}; {state.name} asks for {size} elements of "
            f"{' or '.join(dtypes)}"
        )
    return one


def gather_nvfp4(stored: WeightFormat, tensors: Tensors) -> dict[str, StoredTensor]:
    """Tensors by our names, and the scale of all of a weight as a matrix."""
    gathered: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        kind = "weight" if kind == "weight_packed" else kind
        is_one = kind in (FACTOR, DIVISOR) and math.prod(tensor.shape) == 1
        gathered[f"{module}.{kind}"] = dataclasses.replace(tensor, shape=(1, 1)) if is_one else tensor
    return gathered
