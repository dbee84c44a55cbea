"""Decodes images and videos, and prepares their pixels, in a process with limits:
`python -m quire_engine.encoders.processing`.

Images come from strangers, and decoders are large programs in C. So none runs in a process that serves others.
"""

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire_engine.encoders.families.base import ImageFamily
from quire_engine.encoders.family import as_arrays, find_family, load_processor, load_video_processor
from quire_engine.encoders.video import DEFAULT_FPS, NO_VIDEO, check_pixels, decode_animation
from quire_engine.errors import is_failure, one_line
from quire_engine.system.limited_process import serve
from quire_engine.system.process_state import lower_priority

if TYPE_CHECKING:
    from PIL.Image import Image

    Frames = tuple[list[Image], list[float], float]

MAX_PIXELS = 36_000_000
"""Pixels of one stored image: 6,000 by 6,000, more than the largest that a family keeps whole. In RGBA and float32
that is 0.7 GiB, which `MEMORY_BYTES` allows for."""
MAX_ASPECT_RATIO = 200
"""The longer side by the shorter, as in Qwen's processors: beyond it a side is resized to nothing, or the image to
thousands of tiles."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are decoded."""
SECONDS = 10.0
"""CPU time of one image; usual ones take tens of milliseconds."""
VIDEO_SECONDS = 40.0
"""The same of a video: 768 frames at usual sizes."""
MEMORY_BYTES = 2 << 30
"""On top of the idle process."""


class Job(msgspec.Struct, array_like=True):
    """An image or a video to prepare: its content is in shared memory, from the first byte on. Tensors are written
    after it."""

    seconds: float
    memory: int
    num_bytes: int
    size: tuple[int, int] | None = None
    """Width and height of an image or frames whose content are their pixels, in RGB; None: the content are files."""
    frame_bytes: list[int] | None = None
    """Bytes of each frame of a video; None: it is an image."""
    fps: float | None = None
    """Frames per second, if they are known."""


class Prepared(msgspec.Struct, array_like=True):
    """What became of it: tensors in the form of safetensors, in the shared memory."""

    layout: list[int] = []
    num_bytes: int = 0
    error: str | None = None
    seconds: list[float] = []
    """When each frame of a video is shown."""
    fps: float = 0.0
    """Frames per second of these."""


def decode(content: bytes) -> "Image":
    """An RGB image, turned as its EXIF says, on white where it is transparent.

    Raises:
        ValueError: it cannot be decoded, or exceeds a limit; the message says what.
    """
    from PIL import ExifTags, Image

    image, has_frames = open_image(content, f"it is no image in one of the formats {', '.join(FORMATS)}")
    if has_frames:
        raise ValueError("it is animated, or has several pages; give one frame")
    try:
        image.load()
    except Exception as error:  # each of Pillow's formats has its own
        raise ValueError(f"it cannot be decoded: {error}") from None
    turn = 1
    with suppress(Exception):  # malformed EXIF, which does not spoil the pixels
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
    image, turns = flatten(image), Image.Transpose
    undo = {2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
            6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90}.get(turn)  # fmt: skip
    return image if undo is None else image.transpose(undo)


def open_image(content: bytes, unless: str) -> "tuple[Image, bool]":
    """An image that is not decoded yet, and whether it has several frames.

    Raises:
        ValueError: it is in none of the formats, for which the message is `unless`, or exceeds a limit.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(unless) from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has too many pixels; at most {MAX_PIXELS} are taken") from None
    check_size(*image.size)
    # Photographs of telephones have further pictures (MPO), such as one of depths; the first is the photograph.
    return image, image.format != "MPO" and getattr(image, "is_animated", False)


def decode_video(content: bytes, job: Job, family: ImageFamily, settings: Mapping[str, Any]) -> "Frames":
    """RGB frames of one size, the time of each in seconds, and how many a second has.

    Raises:
        ValueError: a frame cannot be decoded, or they exceed a limit; the message says what.
    """
    from PIL import Image

    assert job.frame_bytes is not None
    if job.size is None and len(job.frame_bytes) == 1:
        image, has_frames = open_image(content, NO_VIDEO)
        if has_frames:
            return decode_animation(image, job.fps, partial(family.choose_frames, settings), flatten)
    frames: list[Image.Image] = []
    start = 0
    for number, num_bytes in enumerate(job.frame_bytes, 1):
        own, start = content[start : start + num_bytes], start + num_bytes
        try:
            frame = decode(own) if job.size is None else Image.frombytes("RGB", job.size, own)
        except ValueError as error:
            raise ValueError(f"of its frame {number}, {error}") from None
        check_pixels(len(job.frame_bytes), *frame.size)
        frames.append(frame)
        if frame.size != frames[0].size:
            raise ValueError(f"its frame {number} has the size {frame.size}, and the first {frames[0].size}")
    fps = job.fps or DEFAULT_FPS
    return frames, [number / fps for number in range(len(frames))], fps


def check_size(width: int, height: int) -> None:
    """Raises ValueError if an image has too many pixels, or too few in a row or column."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} by {height} pixels; at most {MAX_PIXELS} are taken")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(f"it has {width} by {height} pixels; a side may be {MAX_ASPECT_RATIO} times the other")


def flatten(image: "Image") -> "Image":
    """An image in RGB, on white where it is transparent, as in vLLM. Raises ValueError: its pixels have 32 bits."""
    from PIL import Image

    if image.mode.startswith("I;16"):  # Pillow would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits; give it with 8 or 16")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def main() -> None:
    """Entry point of the process: its first line of input names the checkpoint."""
    # Before the limits are set; torch's threads would be made for each image.
    os.environ["OMP_NUM_THREADS"] = "1"
    lower_priority()
    from PIL import Image
    from safetensors.numpy import save

    folder = msgspec.json.decode(sys.stdin.buffer.readline(), type=str)
    warnings.simplefilter("ignore")
    family = find_family(Path(folder))
    assert family is not None
    processor: Any = load_processor(family, Path(folder))
    videos = load_video_processor(family, Path(folder))

    def run(job: Job) -> Prepared:
        try:
            content = os.pread(job.memory, job.num_bytes, 0)
            seconds: list[float] = []
            fps = 0.0
            if job.frame_bytes is not None:
                assert videos is not None
                frames, seconds, fps = decode_video(content, job, family, videos.settings)
                found, layout = family.prepare_video(videos.processor, frames)
                arrays = as_arrays(found)
            else:
                image = decode(content) if job.size is None else Image.frombytes("RGB", job.size, content)
                arrays = as_arrays(processor(images=[image], return_tensors="np", **family.arguments))
                layout = family.layout(arrays)
            content = save(arrays)
            os.pwrite(job.memory, content, job.num_bytes)
            return Prepared(layout, len(content), seconds=seconds, fps=fps)
        except MemoryError:
            return Prepared(error=f"preparing it takes more than {MEMORY_BYTES >> 30} GiB")
        except BaseException as error:
            if not is_failure(error):
                raise
            return Prepared(error=one_line(error))

    serve(Job, run, MEMORY_BYTES)


if __name__ == "__main__":
    main()
