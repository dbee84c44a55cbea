"""InternVL 3 (https://arxiv.org/abs/2504.10479, section 2.1): an image is cut into square tiles, whose states are
shuffled into fewer that are longer; the whole image, made smaller, comes last."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire_engine.encoders.families.base import Arrays, ExpandedVideo, ImageFamily, sampled_number
from quire_engine.encoders.families.llava import rename
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip


class InternVL(ImageFamily):
    """See `ImageFamily`."""

    processor = "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil"
    arguments: Mapping[str, Any] = {"crop_to_patches": True}
    video_token = "<video>"

    def __init__(self, fields: Fields) -> None:
        self.placeholder_id = self.image_token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, 151667)
        vision = fields.inner("vision_config")
        given = {name: value for name, value in vision.values.items() if value is not None}
        for name in ("image_size", "patch_size"):
            value = given.get(name)
            if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
                given[name] = value[0]
        self._fields, self._vision = fields, vision.with_values({**DEFAULTS, **given})
        number = self._vision.integer("num_hidden_layers", 1, MAX_LAYERS)
        if fields.integer("vision_feature_layer", -number - 1, number, -1) not in (-1, number):
            raise fields.error("vision_feature_layer", "-1")
        if not self._vision.boolean("use_mean_pooling", True):
            raise self._vision.error("use_mean_pooling", "true")
        fields.choice("vision_feature_select_strategy", ("default",), "default")
        ratio = fields.positive("downsample_ratio", 0.5)
        self._factor = round(1 / ratio)
        side = self._vision.integer("image_size", 1, MAX_SIZE) // self._vision.integer("patch_size", 1, MAX_SIZE)
        if side % self._factor or self._factor * ratio != 1:
            raise fields.error("downsample_ratio", f"1 divided by a divisor of the {side} patches of a row")
        self._num_states = (side // self._factor) ** 2

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """The number of tiles, with the whole image."""
        return [int(arrays["num_patches"][0])]

    def layout_of_states(self, number: int, sizes: Mapping[str, Any]) -> list[int]:
        """The same."""
        return [number // self._num_states]

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """All states between the tokens of their beginning and end."""
        return f"<img>{image_token * self._num_states * layout[0]}</img>"

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """Frames in the middles of equal stretches."""
        count = sampled_number(settings, number, fps)
        return [(2 * position + 1) * number // (2 * count) for position in range(count)]

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """Each frame as one tile."""
        found = processor(images=list(frames), return_tensors="np", crop_to_patches=False)
        return {"pixel_values": found["pixel_values"]}, [len(frames)]

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """A line for each frame, with its number."""
        states = f"<img>{image_token * self._num_states}</img>"
        first, *others = (f"Frame{number + 1}: " for number in range(layout[0]))
        return ExpandedVideo(first, "\n".join((states, *(other + states for other in others))))

    def tower(self) -> "nn.Module":
        """The vision tower, and the projection of shuffled states."""
        from quire_engine.encoders.towers.internvl import InternVLTower

        text_size = self._fields.text().integer("hidden_size", 1, MAX_SIZE, 4096)
        return InternVLTower(self._fields, self._vision, self._factor, text_size)

    def rename(self, name: str) -> str | None:
        """All but the text model."""
        return rename(name)
