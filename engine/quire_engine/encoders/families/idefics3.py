"""Idefics3 (https://arxiv.org/abs/2408.12637, section 3.1) and SmolVLM (https://arxiv.org/abs/2504.05299): a large
image is cut into tiles, and each tile and the whole image, made smaller, are images to a SigLIP tower; their states are
shuffled into fewer that are longer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire_engine.encoders.families.base import Arrays, ExpandedVideo, ImageFamily
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Idefics3(ImageFamily):
    """See `ImageFamily`."""

    processor = "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil"
    arguments: Mapping[str, Any] = {"return_row_col_info": True}
    size_names = ("rows", "cols")

    def __init__(self, fields: Fields) -> None:
        self.placeholder_id = self.image_token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, 128257)
        self._fields, vision = fields, fields.inner("vision_config")
        self._factor = fields.integer("scale_factor", 1, MAX_SIZE, 2)
        side = vision.integer("image_size", 1, MAX_SIZE, 224) // vision.integer("patch_size", 1, MAX_SIZE, 32)
        if side % self._factor:
            raise fields.error("scale_factor", f"a divisor of the {side} patches of a row")
        self._num_states = (side // self._factor) ** 2

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Rows and columns of tiles; 0 for an image that is not cut."""
        return [int(arrays["rows"].item()), int(arrays["cols"].item())]

    def layout_of_states(self, number: int, sizes: Arrays) -> list[int]:
        """The same, if there are so many states."""
        rows, columns = self.layout(sizes)
        if (rows * columns + 1) * self._num_states != number:
            raise ValueError(f"{rows} by {columns} tiles have not {number} states")
        return [rows, columns]

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """A line for each row of tiles, then the whole image."""
        rows, columns = layout
        states = image_token * self._num_states
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{states}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return f"{''.join(lines)}{chr(10) if rows else ''}{AROUND}{WHOLE}{states}{AROUND}"

    def tower(self) -> "nn.Module":
        """SigLIP and the projection of shuffled states."""
        from quire_engine.encoders.towers.idefics3 import Idefics3Tower

        hidden_size = self._fields.text().integer("hidden_size", 1, MAX_SIZE)
        return Idefics3Tower(self._fields.inner("vision_config"), self._factor, hidden_size)

    def rename(self, name: str) -> str | None:
        """All but the text model."""
        name = name.removeprefix("model.")
        return name if name.startswith(("vision_model.", "connector.")) else None


class SmolVLM(Idefics3):
    """The same with another image processor. Of a video, each frame is an image that is not cut, after its time."""

    processor = "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil"
    video_token = "<video>"

    def read_video_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """With those of `video_sampling`, which come first."""
        sampling = settings.get("video_sampling")
        if not isinstance(sampling, dict):
            return dict(settings)
        given = {**settings, "fps": sampling.get("fps"), "num_frames": sampling.get("max_frames")}
        return given | ({"size": sampling["video_size"]} if "video_size" in sampling else {})

    def choose_frames(self, settings: Mapping[str, Any], number: int, fps: float) -> Sequence[int]:
        """As many frames as `num_frames`, or one of each second if these are fewer, the first and the last among them;
        of long videos, without the first and the last second."""
        wanted, most = settings.get("fps") or 1, settings.get("num_frames") or 64
        seconds = number / fps
        count = max(min(round(seconds * wanted), most), 1)
        first, last = 0, number - 1
        if seconds - 2 > most * wanted:
            first, last = int(fps), min(int(number - fps), number - 1)
        return sorted({first + int((last - first) * position / max(count - 1, 1)) for position in range(count)})

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """Each frame as an image."""
        found = processor(images=[list(frames)], return_tensors="np", do_image_splitting=False)
        return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}, [len(frames)]

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """A sentence that tells the number of frames and the length, and a line for each frame."""
        hours, minutes, rest = int(seconds[-1]) // 3600, int(seconds[-1]) // 60 % 60, int(seconds[-1]) % 60
        intro = (
            f"You are provided the following series of {in_words(layout[0])} frames from a "
            f"{hours}:{minutes:02}:{rest:02} [H:MM:SS] video.\n"
        )
        times = [f"\nFrame from {int(one) // 60:02}:{int(one) % 60:02}:" for one in seconds]
        states = f"{AROUND}{WHOLE}{image_token * self._num_states}{AROUND}"
        return ExpandedVideo(intro + times[0], "".join((states, *(one + states for one in times[1:]))), after="\n\n")


def in_words(number: int) -> str:
    """A number below 1000 in English."""
    if number < len(NUMBERS):
        return NUMBERS[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{NUMBERS[number % 10]}" if number % 10 else "")
    rest = f" and {in_words(number % 100)}" if number % 100 else ""
    return f"{NUMBERS[number // 100]} hundred{rest}"
