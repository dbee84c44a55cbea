"""Which family a checkpoint is of, and the image processor that it asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.encoders.families import gemma, idefics3, internvl, llava, qwen_vl
from quire_engine.encoders.families.base import ImageFamily
from quire_engine.encoders.families.other import Other
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.config import architecture_named
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.checkpoints.files import read_json

FAMILIES: Mapping[str, Callable[[Fields], ImageFamily | None]] = {
    "Gemma3ForConditionalGeneration": gemma.Gemma3,
    "Gemma4ForConditionalGeneration": gemma.Gemma4,
    "Glm46VForConditionalGeneration": qwen_vl.Glm46V,
    "Glm4vForConditionalGeneration": qwen_vl.Glm4v,
    "Glm4vMoeForConditionalGeneration": qwen_vl.Glm4vMoe,
    "Idefics3ForConditionalGeneration": idefics3.Idefics3,
    "InternVLForConditionalGeneration": internvl.InternVL,
    "LlavaForConditionalGeneration": llava.Llava,
    "LlavaNextForConditionalGeneration": llava.LlavaNext,
    "LlavaOnevisionForConditionalGeneration": llava.LlavaOnevision,
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
    """The family of a checkpoint; None if it takes no images.

    Raises:
        CheckpointError: its configuration is bad.
        NoImagesError: it takes images, and cannot be served with them.
    """
    fields = Fields(*open_checkpoint(folder).config())
    architecture = architecture_named(fields)
    if isinstance(architecture, str) and architecture in FAMILIES:
        return FAMILIES[architecture](fields)
    has_images = str(architecture).endswith("ForConditionalGeneration") and fields.values.get("vision_config")
    if not has_images or not has_processor(folder):
        return None
    others = folder / PROCESSOR_FILES[1]
    return Other(fields, str(architecture), read_settings(folder), read_json(others) if others.exists() else {})


def load_processor(family: ImageFamily, folder: Path) -> Any:
    """transformers' image processor of a checkpoint, with the settings in its folder.

    Raises:
        CheckpointError: they are bad.
    """
    if isinstance(family, Other):
        return family.prepare
    return _make_processor(family, processor_settings(folder), f"{folder}: the image processor")


def _make_processor(family: ImageFamily, settings: Mapping[str, Any], what: str, *, is_video: bool = False) -> Any:
    module, _, name = family.processor.rpartition(".")
    kind = getattr(import_module(f"transformers.models.{module}"), name)
    if is_video:  # whose processor knows some that the image processor does not
        settings = {name: own for name, own in settings.items() if name in kind.valid_kwargs.__annotations__}
    try:
        return kind(**settings)
    except Exception as error:  # it checks few of them, in its own ways
        raise CheckpointError(f"{what}'s settings are bad: {error}") from error


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """How the frames of videos are prepared."""

    processor: Any
    """transformers' image processor, with the settings of the video processor."""
    settings: Mapping[str, Any]
    """All of these, such as how many frames a second has."""


def load_video_processor(family: ImageFamily, folder: Path) -> VideoProcessor | None:
    """What prepares videos; None: the family takes none.

    Raises:
        CheckpointError: its settings are bad.
    """
    if family.video_token_id is None and not family.video_token:
        return None
    settings = family.read_video_settings(read_video_settings(folder))
    return VideoProcessor(_make_processor(family, settings, f"{folder}: the video processor", is_video=True), settings)


def read_video_settings(folder: Path) -> dict[str, Any]:
    """Settings of the video processor: where transformers 5 writes them, in a file of their own, or those of images."""
    for name, key in ((PROCESSOR_FILES[1], "video_processor"), ("video_preprocessor_config.json", None)):
        if (folder / name).exists():
            found = read_json(folder / name)
            inner = found if key is None else found.get(key)
            if isinstance(inner, dict):
                return inner
    return read_settings(folder)


def has_processor(folder: Path) -> bool:
    """Whether a checkpoint has settings of an image processor."""
    return any((folder / name).exists() for name in PROCESSOR_FILES)


def processor_settings(folder: Path) -> dict[str, Any]:
    """Settings of the image processor, of either file that has them, without its name."""
    return {name: value for name, value in read_settings(folder).items() if name != "image_processor_type"}


def read_settings(folder: Path) -> dict[str, Any]:
    """The same with its name, if the file has it."""
    settings: dict[str, Any] = {}
    for name in PROCESSOR_FILES:
        if not settings and (folder / name).exists():
            found = read_json(folder / name)
            inner = found.get("image_processor")
            settings = inner if isinstance(inner, dict) else found if name == PROCESSOR_FILES[0] else {}
    known = {"processor_class", "feature_extractor_type", "auto_map", "backend"}
    return {name: value for name, value in settings.items() if name not in known}


def as_arrays(found: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an image processor's result, whose nested lists become arrays."""
    return {name: np.ascontiguousarray(value) for name, value in found.items()}
