"""Gemma 3 (https://arxiv.org/abs/2503.19786, section 2.1): SigLIP on a square image, whose states are pooled; they see
each other on both sides in the text model.

Gemma 4 (https://huggingface.co/docs/transformers/model_doc/gemma4): an image of any size, whose states do so in layers
with a window.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire_engine.encoders.families.base import Arrays, ExpandedVideo, ImageFamily
from quire_engine.encoders.families.llava import read_vision, rename
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn


class Gemma3(ImageFamily):
    """See `ImageFamily`."""

    processor = "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil"
    arguments: Mapping[str, Any] = {"do_pan_and_scan": False}
    is_bidirectional = True

    def __init__(self, fields: Fields) -> None:
        self.placeholder_id = fields.integer("boi_token_index", 0, MAX_POSITIONS, 255_999)
        self.image_token_id = fields.integer("image_token_index", 0, MAX_POSITIONS, 262_144)
        self._fields, self._vision = fields, read_vision(fields, ("siglip_vision_model",))
        vision = self._vision
        self._num_states = fields.integer("mm_tokens_per_image", 1, MAX_SIZE, 256)
        patches = vision.integer("image_size", 1, MAX_SIZE, 224) // vision.integer("patch_size", 1, MAX_SIZE, 16)
        side = round(self._num_states**0.5)
        if side**2 != self._num_states or patches % side:
            raise fields.error("mm_tokens_per_image", f"the square of a divisor of the {patches} patches of a row")
        window = fields.text().integer("sliding_window", 1, MAX_POSITIONS, 4096)
        if self._num_states > window:
            raise fields.error("mm_tokens_per_image", f"at most sliding_window={window}")
        self._kernel = patches // side

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Empty: all images have as many states."""
        return []

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """The states between the tokens of their beginning and end."""
        return f"\n\n<start_of_image>{image_token * self._num_states}<end_of_image>\n\n"

    def tower(self) -> "nn.Module":
        """SigLIP, a pool and a projection."""
        from quire_engine.encoders.towers.gemma import Gemma3Tower

        hidden_size = self._fields.text().integer("hidden_size", 1, MAX_SIZE, 2304)
        return Gemma3Tower(self._vision, self._kernel, hidden_size)

    def rename(self, name: str) -> str | None:
        """All but the text model and the head that pools."""
        return rename(name)


class Gemma4(ImageFamily):
    """See `ImageFamily`."""

    processor = "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil"

    def __init__(self, fields: Fields) -> None:
        self.placeholder_id = self.image_token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, 258_880)
        self.video_token_id = fields.integer("video_token_id", 0, MAX_POSITIONS, 258_884)
        self._fields, text = fields, fields.text()
        self.is_bidirectional = text.values.get("use_bidirectional_attention") == "vision"
        self._window = text.integer("sliding_window", 1, MAX_POSITIONS, 512)

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """The number of states."""
        return self.layout_of_states(int(arrays["num_soft_tokens_per_image"][0]), arrays)

    def layout_of_states(self, number: int, sizes: Mapping[str, Any]) -> list[int]:
        """The same."""
        if self.is_bidirectional and number > self._window:
            raise ValueError(f"it has {number} tokens; sliding_window allows {self._window}")
        return [number]

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """The states between the tokens of their beginning and end."""
        return f"<|image>{image_token * layout[0]}<image|>"

    def read_video_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """With the number of states of a frame."""
        return {"max_soft_tokens": 70, **settings}

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """The beginnings of `num_frames` equal stretches, or of as many as there are frames."""
        count = min(settings.get("num_frames") or 32, number)
        return [position * number // count for position in range(count)]

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """Each frame as an image."""
        found = processor(images=list(frames), return_tensors="np")
        arrays = {name: found[name] for name in ("pixel_values", "image_position_ids")}
        return arrays, [len(frames), *self.layout(found)]

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """The states of each frame as those of an image, after its time."""
        states = f"<|image>{video_token * layout[1]}<image|>"
        first, *others = (f"{int(one) // 60:02}:{int(one) % 60:02} " for one in seconds)
        return ExpandedVideo(first, " ".join((states, *(one + states for one in others))))

    def tower(self) -> "nn.Module":
        """The vision tower, a pool and a projection."""
        from quire_engine.encoders.towers.gemma4 import Gemma4Tower

        return Gemma4Tower(
            self._fields.inner("vision_config"), self._fields.text().integer("hidden_size", 1, MAX_SIZE, 2304)
        )

    def rename(self, name: str) -> str | None:
        """All but the text model and the tower of sounds."""
        name = name.removeprefix("model.")
        return name if name.startswith(("vision_tower.", "embed_vision.")) else None
