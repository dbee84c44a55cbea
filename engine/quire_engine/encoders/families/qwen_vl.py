"""Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1) and its successors: images of any size, in about as many
hidden states as they have squares of 28 or 32 pixels; and videos, of which a patch spans two frames."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire_engine.encoders.families.base import Arrays, ExpandedVideo, ImageFamily, sampled_fps
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

NAMES = (
    ("merger.ln_q.", "merger.norm."), ("merger.mlp.0.", "merger.fc1."), ("merger.mlp.2.", "merger.fc2."),
    (".linear_fc", ".fc"),
)  # fmt: skip
"""What modules are called in checkpoints, and in the tower."""


class Qwen2VL(ImageFamily):
    """See `ImageFamily`."""

    processor = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
    size_names = ("image_grid_thw",)
    default_image_token_id = 151655
    default_video_token_id = 151656
    video_settings: Mapping[str, Any] = {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}}

    def __init__(self, fields: Fields) -> None:
        token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, self.default_image_token_id)
        self.placeholder_id = self.image_token_id = token_id
        self.video_token_id = fields.integer("video_token_id", 0, MAX_POSITIONS, self.default_video_token_id)
        self._folder = fields.path.parent
        self._vision, self._text_size = fields.inner("vision_config"), fields.text().integer("hidden_size", 1, MAX_SIZE)
        self._merge_size = self._vision.integer("spatial_merge_size", 1, MAX_SIZE, 2)

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Frames, and rows and columns of patches."""
        found: list[int] = arrays["image_grid_thw"][0].tolist()
        return found

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """Hidden states alone: the prompt has the tokens around an image."""
        frames, rows, columns = self.grid(layout)
        return image_token * (frames * rows * columns)

    def grid(self, layout: Sequence[int]) -> tuple[int, ...]:
        """Frames, and rows and columns of squares of patches."""
        frames, rows, columns = layout
        return frames, rows // self._merge_size, columns // self._merge_size

    def read_video_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """With the defaults of videos' sizes."""
        return {**self.video_settings, **settings}

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """An even number of frames, from the beginnings of as many equal stretches."""
        joined = settings.get("temporal_patch_size") or 2
        wanted = max(number / fps * sampled_fps(settings), settings.get("min_frames") or 4)
        most = min(settings.get("max_frames") or 768, number)
        count = int(min(wanted, most)) // joined * joined
        return [position * number // count for position in range(count)] if count else range(most)

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """Patches that span `temporal_patch_size` frames; the last frame is repeated to fill them."""
        joined = processor.temporal_patch_size
        size = self._resized(processor, frames)
        frames = [*frames, *[frames[-1]] * (-len(frames) % joined)]
        patches: list[npt.NDArray[np.float32]] = []
        grid: list[int] = []
        for start in range(0, len(frames), joined):
            parts = []
            for frame in frames[start : start + joined]:
                if size is not None:
                    frame = frame.resize(size, processor.resample)
                found = processor(images=[frame], return_tensors="np", do_resize=size is None)
                # [patches, channels · frames · pixels], with the same image as each of its frames.
                parts.append(found["pixel_values"].reshape(len(found["pixel_values"]), 3, joined, -1)[:, :, 0])
                grid = found["image_grid_thw"][0, 1:].tolist()
            patches.append(np.stack(parts, 2).reshape(len(parts[0]), -1))
        shape = np.array([[len(patches), *grid]], np.int64)
        return {"pixel_values": np.concatenate(patches), "image_grid_thw": shape}, shape[0].tolist()

    def _resized(self, processor: Any, frames: "Sequence[Image]") -> tuple[int, int] | None:
        """Width and height of the frames of a video; None: the processor resizes each like an image."""
        return None

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """Hidden states alone; their frames are one position apart."""
        return ExpandedVideo("", self.expand(layout, video_token), self.grid(layout))

    def tower(self) -> "nn.Module":
        """A vision transformer whose patches have rotary positions, and the merger."""
        from quire_engine.encoders.towers.qwen_vl import qwen2_vl

        return qwen2_vl(self._vision, self._text_size)

    def rename(self, name: str) -> str | None:
        """All but the text model."""
        name = name.removeprefix("model.")
        if not name.startswith("visual."):
            return None
        name = name.removeprefix("visual.")
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        return name


class Qwen25VL(Qwen2VL):
    """The same with attention in windows (https://arxiv.org/abs/2502.13923, section 2.1.1)."""

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """Positions of frames follow their time (section 2.1.2)."""
        per_second = self._vision.integer("tokens_per_second", 1, MAX_SIZE, 4)
        joined = self._vision.integer("temporal_patch_size", 1, MAX_SIZE, 2)
        expanded = super().expand_video(layout, seconds, fps, image_token, video_token)
        return expanded._replace(frame_interval=joined / fps * per_second)

    def tower(self) -> "nn.Module":
        """A vision transformer, and the merger."""
        from quire_engine.encoders.towers.qwen_vl import qwen2_5_vl

        return qwen2_5_vl(self._vision, self._text_size)


class Qwen3VL(Qwen2VL):
    """The same with learned positions, and features of some layers (https://arxiv.org/abs/2511.21631). Of a video,
    texts say when its frames are shown."""

    video_settings: Mapping[str, Any] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}, "patch_size": 16,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """Frames at equal distances, the first and the last among them."""
        wanted = max(int(number / fps * sampled_fps(settings)), settings.get("min_frames") or 4)
        count = min(wanted, settings.get("max_frames") or 768, number)
        found: list[int] = np.linspace(0, number - 1, count).round().astype(int).tolist()
        return found

    def _resized(self, processor: Any, frames: "Sequence[Image]") -> tuple[int, int]:
        """Sizes of which all frames together have as many pixels as the settings allow."""
        factor, joined = processor.patch_size * processor.merge_size, processor.temporal_patch_size
        number, (width, height) = max(len(frames), joined), frames[0].size
        whole = round(number / joined) * joined
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        sides = [round(side / factor) * factor for side in (width, height)]
        if whole * math.prod(sides) > most:
            beta = math.sqrt(number * width * height / most)
            sides = [max(factor, math.floor(side / beta / factor) * factor) for side in (width, height)]
        elif whole * math.prod(sides) < least:
            beta = math.sqrt(least / (number * width * height))
            sides = [math.ceil(side * beta / factor) * factor for side in (width, height)]
        return sides[0], sides[1]

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """The hidden states of each frame between the tokens of their beginning and end, after its time; as that of
        frames that a patch spans, the middle between the first and the last."""
        frames, rows, columns = self.grid(layout)
        joined = self._vision.integer("temporal_patch_size", 1, MAX_SIZE, 2)
        last = len(seconds) - 1
        times = [
            (seconds[joined * number] + seconds[min(joined * (number + 1) - 1, last)]) / 2 for number in range(frames)
        ]
        states = f"<|vision_start|>{video_token * (rows * columns)}<|vision_end|>"
        first, *others = (f"<{one:.1f} seconds>" for one in times)
        return ExpandedVideo(first, "".join((states, *(one + states for one in others))), (1, rows, columns))

    def tower(self) -> "nn.Module":
        """A vision transformer, and its mergers."""
        from quire_engine.encoders.towers.qwen_vl import qwen3_vl

        return qwen3_vl(self._vision, self._text_size)


class Qwen35(Qwen3VL):
    """Qwen3.5 and 3.6."""

    default_image_token_id = 248056
    default_video_token_id = 248057


class Glm4v(Qwen3VL):
    """GLM-4.1V (https://arxiv.org/abs/2507.01006, section 2.1), whose tower is transformers' own. Of a video, each
    frame is an image to the text model, before its time."""

    processor = "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil"
    default_image_token_id = 151343
    default_video_token_id = 151344
    video_settings: Mapping[str, Any] = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}}

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """Frames at equal times; of long videos, as many as of `max_duration` seconds."""
        rate, most = sampled_fps(settings), settings.get("max_duration") or 300
        seconds = number / fps
        if seconds <= most:
            times = [position / rate for position in range(max(int(seconds * rate), 1))]
        elif int(most * rate) >= number:
            return range(number)
        else:
            times = np.linspace(0, seconds, int(most * rate)).tolist()
        return sorted({min(number - 1, math.ceil(time * fps)) for time in times})

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """The same, each frame of the grid as an image."""
        arrays, (number, rows, columns) = super().prepare_video(processor, frames)
        return {**arrays, "image_grid_thw": np.array([[1, rows, columns]] * number)}, [number, rows, columns]

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """The hidden states of each frame as those of an image, and then the time of the first that a patch spans."""
        frames, rows, columns = self.grid(layout)
        states = f"<|begin_of_image|>{image_token * (rows * columns)}<|end_of_image|>"
        *times, last = map(self._time, seconds[::2][:frames])
        text = "".join((*(states + one for one in times), states))
        return ExpandedVideo("", text, (1, rows, columns), after=last)

    def _time(self, seconds: float) -> str:
        return str(int(seconds))

    def tower(self) -> "nn.Module":
        """The vision part of transformers' model."""
        from quire_engine.encoders.towers.transformers_tower import TransformersTower

        return TransformersTower(self._folder)

    def rename(self, name: str) -> None:
        """None: transformers reads the files."""


class Glm4vMoe(Glm4v):
    """GLM-4.5V: the same with other tokens."""

    default_image_token_id = 151363
    default_video_token_id = 151364


class Glm46V(Glm4v):
    """GLM-4.6V: the same with exact times, and other frames."""

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """Three pairs of frames a second of short videos, one or half a pair of longer ones."""
        joined, seconds = settings.get("temporal_patch_size") or 2, number / fps
        shown = min(seconds, 2400)
        rate = joined * (3 if shown <= 30 else 1 if shown <= 300 else 0.5)
        most = min(int(shown * rate), 640)
        found: list[int] = []
        next_time = 0.0
        for position in range(number if number >= most else 0):
            if position / fps >= next_time:
                found.append(position)
                next_time += 1 / rate
                if next_time >= int(seconds):
                    break
        if len(found) != most:
            first, last = (found[0], found[-1]) if 0 < len(found) < most else (0, number - 1)
            found = np.linspace(first, last, max(most, 1)).astype(int).tolist()
        return sorted({*found})

    def _time(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"
