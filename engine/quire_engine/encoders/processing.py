"""Decodes images and prepares their pixels, in a process with limits: `python -m quire_engine.encoders.processing`.

Images come from strangers, and decoders are large programs in C. So none runs in a process that serves others.
"""

import os
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire_engine.encoders.family import NICENESS, as_arrays, find_family, load_processor
from quire_engine.errors import is_failure, one_line
from quire_engine.system.limited_process import serve

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 36_000_000
"""Of one image, as it is stored: 6,000 by 6,000."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are decoded."""
SECONDS = 10.0
"""CPU time of one image; usual ones take tens of milliseconds."""
MEMORY_BYTES = 2 << 30
"""On top of the idle process."""


class Job(msgspec.Struct, array_like=True):
    """An image to prepare: its file is in the shared memory, from the first byte on. Tensors are written after it."""

    seconds: float
    num_bytes: int


class Prepared(msgspec.Struct, array_like=True):
    """What became of it: tensors in the form of safetensors, in the shared memory."""

    layout: list[int] = []
    num_bytes: int = 0
    error: str | None = None


def decode(content: bytes) -> "Image":
    """An RGB image, turned as its EXIF says.

    Raises:
        ValueError: it cannot be decoded, or exceeds a limit; the message says what.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is no image in one of the formats {', '.join(FORMATS)}") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} by {height} pixels; at most {MAX_PIXELS} are taken")
    if getattr(image, "n_frames", 1) > 1:
        raise ValueError("it is animated, or has several pages; give one frame")
    turned = ImageOps.exif_transpose(image)
    return turned.convert("RGB")


def main() -> None:
    """Entry point of the process: its first line of input names the checkpoint and the shared memory."""
    # Before the limits are set; torch's threads would be made for each image.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.nice(max(NICENESS - os.nice(0), 0))
    from safetensors.numpy import save

    folder, memory = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, int])
    warnings.simplefilter("ignore")
    family = find_family(Path(folder))
    assert family is not None
    processor: Any = load_processor(family, Path(folder))

    def run(job: Job) -> Prepared:
        try:
            image = decode(os.pread(memory, job.num_bytes, 0))
            arrays = as_arrays(processor(images=[image], return_tensors="np", **family.arguments))
            content = save(arrays)
            os.pwrite(memory, content, job.num_bytes)
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
