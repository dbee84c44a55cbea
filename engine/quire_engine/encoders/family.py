"""What a family of models says of images, and which family a checkpoint is of."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from quire_engine.encoders.families import gemma, idefics3, internvl, llava, qwen_vl
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.checkpoints.files import read_json

if TYPE_CHECKING:
    from torch import nn

NICENESS = 5
"""Niceness of the processes that decode and encode images: steps of the engine come first."""
Arrays = Mapping[str, npt.NDArray[Any]]
"""What transformers' image processor makes of one image, by its names."""


class ImageFamily(Protocol):
    """A family of models that take images."""

    placeholder_id: int
    """The token that stands for an image in a prompt."""
    image_token_id: int
    """The token of each hidden state, among those that a placeholder becomes."""
    processor: str
    """The image processor: module and class in transformers' `models`, which needs Pillow alone."""
    arguments: Mapping[str, Any]
    """Of the processor's call."""
    is_bidirectional: bool
    """Whether the hidden states of an image see each other on both sides in the text model."""

    def layout(self, arrays: Arrays) -> list[int]:
        """The few numbers that an image's tokens follow from, such as how many parts it was cut into."""

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """The text of the tokens that a placeholder becomes; `image_token` is that of `image_token_id`."""

    def grid(self, layout: Sequence[int]) -> tuple[int, ...]:
        """Frames, rows and columns of the hidden states, for rotary positions of three dimensions; else empty."""

    def tower(self) -> "nn.Module":
        """The model, in torch's default dtype and device; its `forward` takes the arrays as tensors, and returns
        [n, E], the hidden states of the image tokens in their order. Modules with a method `pack` are packed once they
        are loaded."""

    def rename(self, name: str) -> str | None:
        """The tower's name of a tensor of the checkpoint; None if it is of another part."""


FAMILIES: Mapping[str, Callable[[Fields], ImageFamily | None]] = {
    "Gemma3ForConditionalGeneration": gemma.Gemma3,
    "Gemma4ForConditionalGeneration": gemma.gemma4,
    "Idefics3ForConditionalGeneration": idefics3.Idefics3,
    "InternVLForConditionalGeneration": internvl.InternVL,
    "LlavaForConditionalGeneration": llava.Llava,
    "LlavaNextForConditionalGeneration": llava.LlavaNext,
    "Mistral3ForConditionalGeneration": llava.Mistral3,
    "Qwen2VLForConditionalGeneration": qwen_vl.Qwen2VL,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl.Qwen25VL,
    "Qwen3VLForConditionalGeneration": qwen_vl.Qwen3VL,
    "Qwen3VLMoeForConditionalGeneration": qwen_vl.Qwen3VL,
    "Qwen3_5ForConditionalGeneration": qwen_vl.Qwen35,
    "Qwen3_5MoeForConditionalGeneration": qwen_vl.Qwen35,
    "SmolVLMForConditionalGeneration": idefics3.SmolVLM,
}
"""By architecture. None: a checkpoint takes no images."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where the settings of an image processor are; transformers 5 writes the second."""


def find_family(folder: Path) -> ImageFamily | None:
    """The family of a checkpoint; None if it takes no images. Raises CheckpointError if its configuration is bad."""
    path, values = open_checkpoint(folder).config()
    fields = Fields(path, values)
    names = values.get("architectures")
    family = FAMILIES.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    return None if family is None else family(fields)


def load_processor(family: ImageFamily, folder: Path) -> Any:
    """transformers' image processor of a checkpoint, with the settings in its folder.

    Raises:
        CheckpointError: they are bad.
    """
    module, _, name = family.processor.rpartition(".")
    kind = getattr(import_module(f"transformers.models.{module}"), name)
    settings = processor_settings(folder)
    try:
        return kind(**settings)
    except Exception as error:  # it checks few of them, in its own ways
        raise CheckpointError(f"{folder}: the image processor's settings are bad: {error}") from error


def has_processor(folder: Path) -> bool:
    """Whether a checkpoint has settings of an image processor."""
    return any((folder / name).exists() for name in PROCESSOR_FILES)


def processor_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor, of either file that has them."""
    settings: dict[str, Any] = {}
    for name in PROCESSOR_FILES:
        if not settings and (folder / name).exists():
            found = read_json(folder / name)
            inner = found.get("image_processor")
            settings = inner if isinstance(inner, dict) else found if name == PROCESSOR_FILES[0] else {}
    known = {"image_processor_type", "processor_class", "feature_extractor_type", "auto_map", "backend"}
    return {name: value for name, value in settings.items() if name not in known}


def as_arrays(found: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an image processor's result, whose nested lists become arrays."""
    return {name: np.ascontiguousarray(value) for name, value in found.items()}
