"""Decodes images and prepares their pixels, in a process with limits: `python -m quire_engine.encoders.processing`.

Images come from strangers, and decoders are large programs in C. So none runs in a process that serves others.
"""

import os
import sys
import warnings
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire_engine.encoders.family import as_arrays, find_family, load_processor
from quire_engine.errors import is_failure, one_line
from quire_engine.system.limited_process import serve
from quire_engine.system.process_state import lower_priority

if TYPE_CHECKING:
    from PIL.Image import Image

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
MEMORY_BYTES = 2 << 30
"""On top of the idle process."""


class Job(msgspec.Struct, array_like=True):
    """An image to prepare: its content is in shared memory, from the first byte on. Tensors are written after it."""

    seconds: float
    memory: int
    num_bytes: int
    size: tuple[int, int] | None = None
    """Width and height of an image whose content are its pixels, in RGB; None: its content is a file."""


class Prepared(msgspec.Struct, array_like=True):
    """What became of it: tensors in the form of safetensors, in the shared memory."""

    layout: list[int] = []
    num_bytes: int = 0
    error: str | None = None


def decode(content: bytes) -> "Image":
    """An RGB image, turned as its EXIF says, on white where it is transparent.

    Raises:
        ValueError: it cannot be decoded, or exceeds a limit; the message says what.
    """
    from PIL import ExifTags, Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is no image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"it has too many pixels; at most {MAX_PIXELS} are taken") from None
    check_size(*image.size)
    # Photographs of telephones have further pictures (MPO), such as one of depths; the first is the photograph.
    if image.format != "MPO" and getattr(image, "is_animated", False):
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

    def run(job: Job) -> Prepared:
        try:
            content = os.pread(job.memory, job.num_bytes, 0)
            image = decode(content) if job.size is None else Image.frombytes("RGB", job.size, content)
            arrays = as_arrays(processor(images=[image], return_tensors="np", **family.arguments))
            content = save(arrays)
            os.pwrite(job.memory, content, job.num_bytes)
            return Prepared(family.layout(arrays), len(content))
        except MemoryError:
            return Prepared(error=f"preparing it takes more than {MEMORY_BYTES >> 30} GiB")
        except BaseException as error:
            if not is_failure(error):
                raise
            return Prepared(error=one_line(error))

    serve(Job, run, MEMORY_BYTES)


if __name__ == "__main__":
    main()
