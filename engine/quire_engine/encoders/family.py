"""Which family a checkpoint is of, and the image processor that it asks for."""

import hashlib
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
from quire_engine.models.checkpoints import is_of_text_model, open_checkpoint, weight_files
from quire_engine.models.checkpoints.config import architecture_named
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.checkpoints.files import brief, open_regular, parse_object, read_json

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
_VIDEO_FILE = "video_preprocessor_config.json"
_PIECE = 1 << 20


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
    for name, key in ((PROCESSOR_FILES[1], "video_processor"), (_VIDEO_FILE, None)):
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


def check_same_tower(folder: Path, present: Path) -> None:
    """Check that a checkpoint gives the hidden states of images that another one gives.

    Args:
        folder: the checkpoint, whose headers are checked.
        present: the other one.

    Raises:
        CheckpointError: it does not, or a file cannot be read.
    """
    if folder.samefile(present):
        raise CheckpointError(
            f"{folder}: the present weights were read from it, so that the part for images cannot be compared; give a "
            "folder of its own"
        )
    here, there = _other_parts(present), _other_parts(folder)
    changed = next((name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)), None)
    if changed is not None:
        raise CheckpointError(
            f"{folder}: {brief(changed)} is not that of {present}, and the part for images keeps its weights and "
            "settings; load it as a model of its own"
        )


def _other_parts(folder: Path) -> dict[str, object]:
    """What a checkpoint has besides its text model: digests of tensors, and settings, by name."""
    found: dict[str, object] = {"vision_config": open_checkpoint(folder).config()[1].get("vision_config")}
    found |= {name: read_json(folder / name) for name in (*PROCESSOR_FILES, _VIDEO_FILE) if (folder / name).exists()}
    for path in weight_files(folder):
        with open_regular(path) as file:
            header = parse_object(path, file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name, entry in header.items():
                if name == "__metadata__" or is_of_text_model(name):
                    continue
                begin, end = entry["data_offsets"]
                digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']}".encode())
                file.seek(start + begin)
                for first in range(begin, end, _PIECE):
                    digest.update(file.read(min(_PIECE, end - first)))
                found[name.removeprefix("model.")] = digest.digest()
    return found
