"""What a family of models says of images."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from quire_engine.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

Arrays = Mapping[str, npt.NDArray[Any]]
"""What transformers' image processor makes of one image, by its names."""


class NoImagesError(CheckpointError):
    """A checkpoint is served as text alone; the message states its architecture, and why."""


class ImageFamily(Protocol):
    """A family of models that take images."""

    placeholder_id: int
    """The token that stands for an image in a prompt."""
    image_token_id: int
    """The token of each hidden state, among those that a placeholder becomes."""
    other_state_ids: Sequence[int] = ()
    """Further tokens among these that have a hidden state each."""
    processor: str
    """The image processor: module and class in transformers' `models`, which needs Pillow alone."""
    arguments: Mapping[str, Any] = {}
    """Of the processor's call."""
    is_bidirectional: bool = False
    """Whether the hidden states of an image see each other on both sides in the text model."""

    def layout(self, arrays: Arrays) -> list[int]:
        """The few numbers that an image's tokens follow from, such as how many parts it was cut into."""

    def expand(self, layout: Sequence[int], image_token: str) -> str | list[int]:
        """The tokens that a placeholder becomes, or their text; `image_token` is that of `image_token_id`."""

    def grid(self, layout: Sequence[int]) -> tuple[int, ...]:
        """Frames, rows and columns of the hidden states, for rotary positions of three dimensions; else empty."""
        return ()

    def tower(self) -> "nn.Module":
        """The model, in torch's default dtype and device; its `forward` takes the arrays as tensors, and returns
        [n, E], the hidden states of the image tokens in their order. Modules with a method `pack` are packed once they
        are loaded."""

    def rename(self, name: str) -> str | None:
        """The tower's name of a tensor of the checkpoint; None if it is of another part."""
