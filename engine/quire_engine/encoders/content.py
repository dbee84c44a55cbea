"""The content of images and videos in prompts: files, or pixels of Pillow's images and of arrays. The process that
decodes them takes it, and its digest is their key in the cache."""

from typing import Any

import numpy as np

from quire_engine.encoders import processing
from quire_engine.encoders.video import Video, check_number, check_pixels
from quire_engine.errors import RequestError

MAX_IMAGE_BYTES = 32 << 20
"""The largest file of an image, and of all frames of a video together."""


def content_of(image: Any) -> tuple[bytes, processing.Job]:
    """The content of an image or a video, and the job that prepares it.

    Raises:
        RequestError: it is of another type, or exceeds a limit.
    """
    if not isinstance(image, Video):
        content, size = _image_content(image)
        return content, processing.Job(processing.SECONDS, -1, len(content), size)
    job = processing.Job(processing.VIDEO_SECONDS, -1, 0, frame_bytes=[], fps=image.fps)
    try:
        check_number(len(image.frames))
        contents: list[bytes] = []
        for number, frame in enumerate(image.frames, 1):
            content, size = _image_content(frame)
            if contents and size != job.size:
                raise ValueError(f"its frame {number} has the size {size}, and the first {job.size}")
            if size is not None:
                check_pixels(len(image.frames), *size)
            job.size, job.num_bytes = size, job.num_bytes + len(content)
            if size is None and job.num_bytes > MAX_IMAGE_BYTES:
                raise ValueError(f"its files have more than {MAX_IMAGE_BYTES >> 20} MiB together")
            contents.append(content)
    except RequestError as error:
        raise RequestError("multi_modal_data", str(error).replace("an image", "a frame of a video", 1)) from None
    except ValueError as error:
        raise unusable(str(error), job) from None
    job.frame_bytes = list(map(len, contents))
    return b"".join(contents), job


def _image_content(image: Any) -> tuple[bytes, tuple[int, int] | None]:
    """An image's file; or its pixels in RGB, and its width and height."""
    from PIL import Image

    if isinstance(image, bytes | bytearray | memoryview):
        if len(image) > MAX_IMAGE_BYTES:
            raise unusable(f"its file has {len(image)} bytes; at most {MAX_IMAGE_BYTES >> 20} MiB are taken")
        return bytes(image), None
    try:
        if isinstance(image, Image.Image):
            processing.check_size(*image.size)
            return processing.flatten(image).tobytes(), image.size
        if not isinstance(image, np.ndarray):
            raise ValueError(
                f"it is {type(image).__name__}; it must be the bytes of a file, an image of Pillow, or an array"
            )
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(
                f"it is an array {list(image.shape)} of {image.dtype}; it must be [height, width, 3] of uint8"
            )
        height, width, _ = image.shape
        processing.check_size(width, height)
        return image.tobytes(), (width, height)
    except (OSError, ValueError) as error:  # Pillow's images are read when they are used
        raise unusable(str(error)) from None


def unusable(reason: str, job: processing.Job | None = None) -> RequestError:
    """The error of an image, or of a job's video."""
    what = "an image" if job is None or job.frame_bytes is None else "a video"
    return RequestError.because("multi_modal_data", f"{what} cannot be used: {reason}")
