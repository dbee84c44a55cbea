"""What a family of models says of images."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy.typing as npt

from quire_engine.errors import CheckpointError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

Arrays = Mapping[str, npt.NDArray[Any]]
"""What transformers' image processor makes of one image, by its names."""


class NoImagesError(CheckpointError):
    """A checkpoint is served as text alone; the message states its architecture, and why."""


DEFAULT_SAMPLED_FPS = 2.0
"""Frames of an animation that are taken of each second."""


class ExpandedVideo(NamedTuple):
    """What a video is in a prompt."""

    before: str
    """Text whose tokens depend on what is before it."""
    text: str
    """After this."""
    grid: tuple[int, ...] = ()
    """Frames, rows and columns of each run of hidden states."""
    frame_interval: float = 1.0
    """Rotary positions from a frame of the grid to the next."""
    after: str = ""
    """Text whose tokens depend on what is after it."""


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

    size_names: Sequence[str] | None = ()
    """The arrays of the image processor that `layout_of_states` reads; None: hidden states of images are not taken."""

    def layout_of_states(self, number: int, sizes: Arrays) -> list[int]:
        """The layout of an image whose hidden states are given, `number` of them."""
        return self.layout(sizes)

    def grid(self, layout: Sequence[int]) -> tuple[int, ...]:
        """Frames, rows and columns of the hidden states, for rotary positions of three dimensions; else empty."""
        return ()

    video_token_id: int | None = None
    """The token that stands for a video in a prompt, if the configuration says it; it may also be that of states."""
    video_token: str = ""
    """Else its text, if there are videos."""

    def read_video_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of transformers' video processor, from its file; with defaults that the image processor lacks."""
        return dict(settings)

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """Which frames of an animation are taken, of `number` with `fps` a second: those at the beginnings of equal
        stretches."""
        count = sampled_number(settings, number, fps)
        return [position * number // count for position in range(count)]

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """What the tower takes, of frames of one size, and the layout that `expand_video` takes; `processor` is the
        image processor with a video's settings."""
        raise ValueError(f"{type(self).__name__} takes no videos")

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> "ExpandedVideo":
        """The tokens of a video whose frames are shown at `seconds`, `fps` in each second."""
        raise ValueError(f"{type(self).__name__} takes no videos")

    def tower(self) -> "nn.Module":
        """The model, in torch's default dtype and device; its `forward` takes the arrays as tensors, and returns
        [n, E], the hidden states of the image tokens in their order. Modules with a method `pack` are packed once they
        are loaded."""

    def rename(self, name: str) -> str | None:
        """The tower's name of a tensor of the checkpoint; None if it is of another part."""


def sampled_fps(settings: Mapping[str, Any]) -> float:
    """Frames of each second that a video processor takes."""
    return float(settings.get("fps") or DEFAULT_SAMPLED_FPS)


def sampled_number(settings: Mapping[str, Any], number: int, fps: float) -> int:
    """How many of `number` frames, with `fps` a second, these are; at least one."""
    return max(min(int(number / fps * sampled_fps(settings)), number), 1)
