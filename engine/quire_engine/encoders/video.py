"""Videos in prompts: frames, and how many a second has. Containers such as MP4 are not decoded; animations are.

::

    files of frames, arrays, Pillow's images ──► all of them ───────────────────────────┐
    an animation (GIF, WebP, PNG) ──► as many frames a second as the model's settings say ─┴─► RGB, of one size
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_engine.errors import RequestError, quote

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_FPS = 2.0
"""Frames per second of frames that come without it, as in vLLM."""
MAX_FRAMES = 768
"""Of a video, after those of an animation are chosen; Qwen's."""
MAX_VIDEO_PIXELS = 100_000_000
"""Of all frames together: 300 MB in RGB."""
_SHORTEST_DURATION = 0.02
"""In seconds. Frames of an animation that are shown for less are shown for a tenth of a second, as in browsers."""
_UNSTATED_DURATION = 0.1
_ANIMATIONS = ("GIF", "PNG", "WEBP")
_URL = "data:video/jpeg"
NO_VIDEO = (
    "it is no animation in GIF, WebP or PNG; containers such as MP4 are not decoded: send frames, as "
    f"{_URL};base64,FRAME,FRAME,…"
)
"""What is said of a file that is none."""

NO_VIDEOS = "this model does not take; give frames of it as images"
"""What is said of a model that takes none."""


@dataclass(frozen=True, slots=True)
class Video:
    """A video of a prompt."""

    frames: Sequence[Any]
    """Each is what an image may be: a file as bytes, Pillow's image, or an array [height, width, 3] of uint8. Or one
    file, of an animation."""
    fps: float | None = None
    """Frames per second; None: 2, or those of the animation."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(map(len, self.frames))

    @property
    def text(self) -> str:
        """Its files as a `data:` URL, as the input `image` takes them."""
        fps = "" if self.fps is None else f";fps={self.fps!r}"
        return f"{_URL}{fps};base64,{','.join(base64.b64encode(frame).decode() for frame in self.frames)}"


def named(content: Sequence[Any]) -> str:
    """What to call the images and videos of a prompt in an error."""
    num_videos = sum(isinstance(one, Video) for one in content)
    if num_videos < len(content):
        return "images and videos" if num_videos else "images"
    return "a video" if num_videos == 1 else "videos"


def read_videos(given: Any) -> list[Video]:
    """The videos of `multi_modal_data`: one, or a list of them.

    A video is a file of an animation, an array [frames, height, width, 3], or a list of frames; or one of these beside
    `{"fps": …}` in a tuple.

    Raises:
        RequestError: it is nothing of this.
    """
    if not isinstance(given, list | tuple) or not given or _is_with_metadata(given) or all(map(_is_frame, given)):
        return [_read_video(given)]
    return [_read_video(one) for one in given]


def _read_video(given: Any) -> Video:
    if isinstance(given, Video):
        return given
    if _is_with_metadata(given):
        frames, metadata = given
        fps = metadata.get("fps")
        if set(metadata) - {"fps"} or (fps is not None and not _is_rate(fps)):
            raise _error(f"{quote(dict(metadata))} is beside a video; it must be {{'fps': number above 0}} alone")
        return Video(_read_video(frames).frames, None if fps is None else float(fps))
    if isinstance(given, bytes | bytearray | memoryview):
        return Video([given])
    if isinstance(given, np.ndarray) and given.ndim == 4:
        return Video(list(given))
    if not isinstance(given, list | tuple) or not given or not all(map(_is_frame, given)):
        raise _error(f"a video is {quote(given)}; it must be a file, an array of 4 dimensions, or a list of frames")
    return Video(list(given))


def _is_frame(given: Any) -> bool:
    if isinstance(given, np.ndarray):
        return given.ndim == 3
    return not isinstance(given, Video | list | tuple | str | Mapping)


def _is_with_metadata(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _error(reason: str) -> RequestError:
    return RequestError.because("multi_modal_data", reason)


def read_url(url: str, decode: Callable[[str], bytes]) -> Video:
    """The video of a `data:` URL: an animation, or with `video/jpeg` the files of frames with commas between them, as
    vLLM takes it. `;fps=` before `;base64` is their rate.

    Raises:
        ValueError: it is none; the message says why.
    """
    head, comma, data = url.partition(",")
    kind, *parameters = head.split(";")
    if not kind.lower().startswith("data:") or not comma or not parameters or parameters.pop().lower() != "base64":
        raise ValueError(
            f"{quote(url)} is no data: URL with base64; it must be data:image/gif;base64,… of an animation, or "
            f"{_URL};base64,FRAME,FRAME,… of frames"
        )
    fps: float | None = None
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "fps":
            try:
                fps = float(value)
            except ValueError:
                fps = 0.0
            if not _is_rate(fps):
                raise ValueError(f"fps is {quote(value)}; it must be a number above 0")
    num_frames = data.count(",") + 1
    check_number(num_frames)
    return Video([decode(frame) for frame in data.split(",")], fps)


def check_number(num_frames: int) -> None:
    """Raises ValueError if a video has too many frames."""
    if num_frames > MAX_FRAMES:
        raise ValueError(f"it has {num_frames} frames; at most {MAX_FRAMES} are taken")


def check_pixels(num_frames: int, width: int, height: int) -> None:
    """Raises ValueError if the frames of a video have too many pixels together."""
    check_number(num_frames)
    if num_frames * width * height > MAX_VIDEO_PIXELS:
        raise ValueError(
            f"it has {num_frames} frames of {width} by {height} pixels; at most {MAX_VIDEO_PIXELS} pixels are taken"
        )


def decode_animation(
    image: "Image", fps: float | None, choose: Callable[[int, float], Sequence[int]],
    flatten: Callable[["Image"], "Image"],
) -> tuple[list["Image"], list[float], float]:  # fmt: skip
    """Frames of an animation; the time of each in seconds; and how many a second has.

    Args:
        image: opened.
        fps: frames per second; None: the animation's own.
        choose: which frames are taken, of so many with so many a second.
        flatten: what makes RGB of a frame.

    Raises:
        ValueError: it has too many pixels.
    """
    if image.format not in _ANIMATIONS:
        raise ValueError(f"it has several pages in the format {image.format}; give each as a frame")
    number = int(getattr(image, "n_frames", 1))
    seconds = 0.0
    for position in range(number):
        image.seek(position)
        image.load()
        duration = float(image.info.get("duration") or 0) / 1000
        seconds += duration if duration >= _SHORTEST_DURATION else _UNSTATED_DURATION
    fps = fps or number / seconds
    chosen = choose(number, fps)
    check_pixels(len(chosen), *image.size)
    frames: list[Image] = []
    image.seek(0)
    for position in chosen:
        image.seek(position)
        frames.append(flatten(image))
    return frames, [position / fps for position in chosen], len(chosen) / number * fps
