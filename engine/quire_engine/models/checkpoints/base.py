"""What a checkpoint holds, whatever file format it has: entries of tensors, and slices of them. Does not use torch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire_engine.system.memory import release_pages

if TYPE_CHECKING:
    import torch

BAND = 1 << 22
"""Numbers that are dequantised at a time, so that temporaries are small beside a matrix."""
FLOATING = ("F64", "F32", "BF16", "F16")
"""Types that weights are converted from; types of eight bits or fewer need scales."""
INDICES = ("I64",)
"""Types of numbers of tokens."""
_TEXT = "lm_head.", "mtp.", "model.text_model.", "model.embed_tokens.", "model.layers.", "model.norm."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, or a part of one that the model has as a tensor of its own."""

    name: str
    """Its name in the file."""
    dtype: str
    """As safetensors names it: `F32`, `BF16`, `I8`, …"""
    shape: tuple[int, ...]
    num_bytes: int
    path: Path
    """The file that holds it."""
    reader: "CheckpointReader" = field(repr=False, compare=False)
    """Reads it."""
    first_row: int = 0
    """Where it begins in the file's tensor of that name, if it is a part of it."""
    row_step: int = 1
    """How far apart its rows are there."""
    matrix: int | None = None
    """Which of the matrices it is a part of, if the file's tensor is a stack of them."""
    is_transposed: bool = False
    """The file has its rows as columns."""
    companions: Mapping[str, "StoredTensor"] = field(default_factory=dict)
    """Other tensors that its numbers depend on, such as scales, by what they are: the file's whole tensors."""

    def rows_in_file(self, start: int, stop: int) -> slice:
        """Rows of the file's tensor, for rows of this one."""
        begin, end = (self.first_row + self.row_step * row for row in (start, stop))
        return slice(begin, end, self.row_step)


class CheckpointReader(AbstractContextManager["CheckpointReader"], Protocol):
    """A checkpoint's files. They are open while it is entered, which may be repeated. All methods raise CheckpointError
    if a file is missing, truncated or malformed."""

    format_name: str
    """As messages name it."""
    config_name: str
    """What has the model's configuration, as messages name it."""

    def config(self) -> tuple[Path, dict[str, Any]]:
        """The file with the model's configuration, for messages, and its fields by transformers' names."""

    def tokenizer(self) -> Path | Mapping[str, Any]:
        """The folder of the tokenizer's files; or the values of GGUF's metadata that describe it."""

    def weight_files(self) -> Mapping[Path, int]:
        """The files of the weights, and how many bytes the header of each has."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By their names in the files, or here. Reading the headers takes time and memory by their length alone."""

    def read(self, tensor: StoredTensor, inside: tuple[slice | int, ...], matrix: int | None = None) -> "torch.Tensor":
        """A slice of the file's whole tensor, which may be a view of the file.

        Args:
            tensor: names it.
            inside: where in it, or in one of its matrices.
            matrix: which, if it is not the tensor's own.
        """

    def release(self, piece: "torch.Tensor") -> None:
        """Release the file's pages that a slice is a view of; its numbers are not read again."""


def is_of_text_model(name: str) -> bool:
    """Whether a tensor of a checkpoint with other parts, such as a tower of images, is the text model's."""
    return "language_model." in name or name.startswith(_TEXT)


def release_view(piece: "torch.Tensor") -> None:
    """Release the pages of a file that a tensor is a view of."""
    if piece.numel():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(piece.shape, piece.stride(), strict=True))
        release_pages(piece.data_ptr(), elements * piece.itemsize)
