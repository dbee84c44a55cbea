"""Images from strangers: each gives a right result or an error that says why, and the next image is encoded."""

import asyncio
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from quire_engine.encoders import processing
from quire_engine.encoders.family import find_family
from quire_engine.encoders.image_encoder import ImageEncoder
from quire_engine.encoders.processing import decode
from quire_engine.errors import RequestError
from quire_engine.frontend.tokenizer import load_tokenizer
from support.engines import Stream, engine, params, run
from support.pictures import image_of

RED, WHITE = (255, 0, 0), (255, 255, 255)


def saved(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), color: Any = None, **options: Any) -> bytes:
    file = BytesIO()
    image = Image.new(mode, size, RED if mode == "RGB" and color is None else color or 0)
    image.save(file, kind, **options)
    return file.getvalue()


def noise(kind: str, size: tuple[int, int] = (90, 70), **options: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(image_of(*size)).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *chunks: bytes, depth: int = 1, color: int = 0, rows: bytes | None = None) -> bytes:
    """A black PNG, by default of as little data as its size allows or less."""
    row = 1 + (width * depth + 7) // 8
    rows = bytes(row * height) if rows is None and row * height < 1 << 24 else rows or b"\0"
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *chunks, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def frames(kind: str, **options: Any) -> bytes:
    file = BytesIO()
    pages = [Image.fromarray(image_of(40, 30, seed)) for seed in range(3)]
    pages[0].save(file, kind, save_all=True, append_images=pages[1:], **options)
    return file.getvalue()


def patched(content: bytes, position: int, new: bytes) -> bytes:
    return content[:position] + new + content[position + len(new) :]


def tiff(width: int, height: int, offset: int = 8, next_directory: int = 0) -> bytes:
    """A TIFF of one bit per pixel whose pixels are where `offset` says."""
    tags = ((256, 4, width), (257, 4, height), (258, 3, 1), (259, 3, 1), (262, 3, 1), (273, 4, offset), (277, 3, 1),
            (278, 4, height), (279, 4, (width + 7) // 8 * height))  # fmt: skip
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value & 0xFFFFFFFF) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + directory + struct.pack("<I", next_directory)


def sixteen_bits(kind: str) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((30, 40), 0x8012, np.uint16)).save(file, kind)
    return file.getvalue()


def jpeg_size(width: int, height: int) -> bytes:
    content = saved("JPEG")
    return patched(content, content.index(b"\xff\xc0") + 5, struct.pack(">HH", height, width))


def webp_size(width: int, height: int) -> bytes:
    content = saved("WEBP", lossless=True)
    return patched(content, content.index(b"VP8L") + 9, struct.pack("<I", (width - 1) | (height - 1) << 14))


def with_exif(content: bytes) -> bytes:
    return saved("JPEG", exif=b"Exif\0\0" + content)


NO_IMAGE = "no image in one of the formats"
PIXELS, SIDES, FRAMES, BROKEN = "at most 36000000", "200 times the other", "animated", "cannot be decoded"
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "PNG of 10 billion pixels": (lambda: png(100_000, 100_000), PIXELS),
    "PNG of 2^62 pixels": (lambda: png(2**31 - 1, 2**31 - 1), "."),
    "PNG of 36 million pixels and one row": (lambda: png(6000, 6001), PIXELS),
    "GIF of 4 billion pixels": (lambda: patched(saved("GIF"), 6, b"\xff\xff\xff\xff"), PIXELS),
    "WebP of 268 million pixels": (lambda: webp_size(16384, 16384), PIXELS),
    "WebP of 100 million pixels": (lambda: webp_size(10000, 10000), PIXELS),
    "TIFF of 10 billion pixels": (lambda: tiff(100_000, 100_000), PIXELS),
    "BMP of 1 billion pixels": (lambda: patched(saved("BMP"), 18, struct.pack("<ii", 32000, 32000)), PIXELS),
    "JPEG of 4 billion pixels": (lambda: jpeg_size(65500, 65500), PIXELS),
    "1 by 100,000": (lambda: png(1, 100_000), SIDES),
    "100,000 by 1": (lambda: png(100_000, 1), SIDES),
    "JPEG of 1 by 201": (lambda: saved("JPEG", size=(1, 201)), SIDES),
    "no width": (lambda: png(0, 10, rows=b"\0"), "."),
    "no bytes": (lambda: b"", NO_IMAGE),
    "one byte": (lambda: b"\x89", NO_IMAGE),
    "random bytes": (lambda: image_of(50, 50).tobytes(), NO_IMAGE),
    "text": (lambda: b"not an image", NO_IMAGE),
    "a data: URL": (lambda: b"data:image/png;base64,iVBORw0KGgo=", NO_IMAGE),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', NO_IMAGE),
    "HTML": (lambda: b"<!DOCTYPE html><img src=x>", NO_IMAGE),
    "PDF": (lambda: saved("PDF"), NO_IMAGE),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n", NO_IMAGE),
    "gzip": (lambda: zlib.compress(bytes(99), wbits=31), NO_IMAGE),
    "AVIF": (lambda: saved("AVIF"), NO_IMAGE),
    "ICO": (lambda: saved("ICO"), NO_IMAGE),
    "JPEG 2000": (lambda: saved("JPEG2000"), NO_IMAGE),
    "PPM": (lambda: saved("PPM"), NO_IMAGE),
    "PSD": (lambda: b"8BPS\0\1" + bytes(20), NO_IMAGE),
    "truncated PNG": (lambda: noise("PNG")[:4000], BROKEN),
    "truncated JPEG": (lambda: noise("JPEG")[:2000], BROKEN),
    "truncated GIF": (lambda: noise("GIF")[:3000], BROKEN),
    "truncated WebP": (lambda: noise("WEBP")[:1000], "."),
    "truncated TIFF": (lambda: noise("TIFF")[:-4000], "."),
    "truncated BMP": (lambda: noise("BMP")[:1000], BROKEN),
    "a PNG's signature alone": (lambda: b"\x89PNG\r\n\x1a\n", "."),
    "a PNG whose header has another sum": (lambda: patched(saved("PNG"), 18, b"\1"), "."),
    "a PNG whose pixels are no zlib": (lambda: patched(noise("PNG"), 60, bytes(99)), BROKEN),
    "a PNG without pixels": (lambda: saved("PNG")[:33], "."),
    "the first bytes of a JPEG": (lambda: b"\xff\xd8\xff\xe0", "."),
    "a TIFF of pixels beyond its end": (lambda: tiff(64, 64, offset=2**31), "."),
    "a TIFF whose directories are a ring": (lambda: tiff(64, 64, next_directory=8), "."),
    "a WebP of a false size": (lambda: patched(noise("WEBP"), 4, b"\xff\xff\xff\xff"), "."),
    "animated GIF": (lambda: frames("GIF"), FRAMES),
    "animated WebP": (lambda: frames("WEBP"), FRAMES),
    "animated PNG": (lambda: frames("PNG"), FRAMES),
    "TIFF of three pages": (lambda: frames("TIFF"), FRAMES),
    "TIFF of integers": (lambda: saved("TIFF", "I", color=70000), "32 bits"),
    "TIFF of floats": (lambda: saved("TIFF", "F", color=0.5), "32 bits"),
    "a PNG whose colours inflate to 64 MiB": (
        lambda: png(8, 8, chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(64 << 20)))), "Decompressed data too large"),
    "a PNG whose text inflates to 64 MiB": (
        lambda: png(8, 8, chunk(b"zTXt", b"x\0\0" + zlib.compress(b"x" * (64 << 20)))), "Decompressed data too large"),
    "a file of 33 MiB": (lambda: saved("PNG") + bytes(33 << 20), "at most 32 MiB"),
}  # fmt: skip
"""Name → file, and what the error says."""

RIGHT: dict[str, tuple[Callable[[], bytes], tuple[int, int], tuple[int, int, int]]] = {
    "CMYK": (lambda: saved("JPEG", "CMYK", color=(0, 255, 255, 0)), (40, 30), (254, 0, 0)),
    "gray": (lambda: saved("JPEG", "L", color=128), (40, 30), (128, 128, 128)),
    "16 bits": (lambda: sixteen_bits("PNG"), (40, 30), (128, 128, 128)),
    "16 bits, TIFF": (lambda: sixteen_bits("TIFF"), (40, 30), (128, 128, 128)),
    "16 bits of colours": (
        lambda: png(2, 1, depth=16, color=2, rows=b"\0" + b"\xff\xff\0\0\0\0" * 2), (2, 1), RED),
    "palette": (lambda: saved("PNG", "P"), (40, 30), (0, 0, 0)),
    "palette with a transparent colour": (lambda: saved("PNG", "P", transparency=0), (40, 30), WHITE),
    "transparent": (lambda: saved("PNG", "RGBA", color=(9, 9, 9, 0)), (40, 30), WHITE),
    "half transparent": (lambda: saved("PNG", "RGBA", color=(255, 0, 0, 128)), (40, 30), (255, 127, 127)),
    "gray and transparent": (lambda: saved("PNG", "LA", color=(9, 0)), (40, 30), WHITE),
    "transparent WebP": (lambda: saved("WEBP", "RGBA", color=(9, 9, 9, 0), lossless=True), (40, 30), WHITE),
    "1 bit": (lambda: saved("PNG", "1", color=1), (40, 30), WHITE),
    "LAB": (lambda: saved("TIFF", "LAB", color=(255, 128, 128)), (40, 30), WHITE),
    "GIF of one frame": (lambda: saved("GIF"), (40, 30), RED),
    "progressive": (lambda: saved("JPEG", progressive=True), (40, 30), (254, 0, 0)),
    "a photograph and its second picture": (
        lambda: saved("MPO", save_all=True, append_images=[Image.new("RGB", (40, 30))]), (40, 30), (254, 0, 0)),
    "200 by 1": (lambda: saved("PNG", size=(200, 1)), (200, 1), RED),
    "36 million pixels": (lambda: png(6000, 6000), (6000, 6000), (0, 0, 0)),
    "EXIF of random bytes": (lambda: with_exif(image_of(30, 30).tobytes()), (40, 30), (254, 0, 0)),
    "EXIF that is a ring": (lambda: with_exif(b"II*\0\x08\0\0\0" + b"\0\0\x08\0\0\0"), (40, 30), (254, 0, 0)),
    "EXIF of an orientation 99": (
        lambda: with_exif(b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x63\0\0\0\0\0\0\0"), (40, 30), (254, 0, 0)),
    "EXIF of 60 KB": (lambda: with_exif(b"II*\0" + bytes(60_000)), (40, 30), (254, 0, 0)),
    "a comment of 20 MiB": (
        lambda: patched(saved("PNG"), 33, chunk(b"prVt", bytes(20 << 20)) + saved("PNG")[33:]), (40, 30), RED),
    "bytes behind its end": (lambda: saved("PNG") + b"<script>" * 999, (40, 30), RED),
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(picture_checkpoint: Callable[[str], Path]) -> Iterator[ImageEncoder]:
    folder = picture_checkpoint("smolvlm")
    family = find_family(folder)
    assert family is not None
    encoder = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", 2)
    yield encoder
    encoder.shutdown()


@pytest.fixture
def used(encoder: ImageEncoder, request: pytest.FixtureRequest) -> Iterator[ImageEncoder]:
    """The encoder, which encodes another image afterwards."""
    yield encoder
    seed = zlib.crc32(request.node.name.encode())
    assert encoder.encode(image_of(28, 28, seed)).parts
    assert [os.fstat(memory).st_size for memory in encoder._memories] == [0, 0]


def peak_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_streams_beside_all_of_them_go_on_and_no_process_grows(picture_checkpoint: Callable[[str], Path]) -> None:
    """All are sent at once."""
    contents = {name: make() for name, (make, _) in HOSTILE.items()}

    async def main() -> None:
        images = llm.input_processor.images
        assert images is not None
        good = {"prompt": "a <image>", "multi_modal_data": {"image": image_of(28, 28)}}
        expected = [
            (await Stream(llm, prompt, params(max_tokens=20)).task).outputs for prompt in ([2, 3], [4, 5], good)
        ]

        async def send(name: str) -> None:
            prompt: Any = {"prompt": "a <image>", "multi_modal_data": {"image": contents[name]}}
            with pytest.raises(RequestError, match=HOSTILE[name][1]):
                await Stream(llm, prompt, params()).task

        assert images._tower._process is not None
        pids = [llm.engine_pid, images._tower._process.pid, os.getpid()]
        before = list(map(peak_bytes, pids))
        sent, num_rounds = asyncio.gather(*map(send, HOSTILE)), 0
        while not sent.done() or not num_rounds:
            streams = [Stream(llm, prompt, params(max_tokens=20)) for prompt in ([2, 3], [4, 5])]
            assert [(await stream.task).outputs for stream in streams] == expected[:2]
            num_rounds += 1
        await sent
        assert (await Stream(llm, good, params(max_tokens=20)).task).outputs == expected[2]
        grown = [after - own for after, own in zip(map(peak_bytes, pids), before, strict=True)]
        assert max(grown[:2]) < 64 << 20, "the engine core and the tower have seen none of them"
        assert grown[2] < 512 << 20, "eight prompts at a time are in work, each with a file"
        assert images._processing._process is not None
        assert peak_bytes(images._processing._process.pid) < processing.MEMORY_BYTES

    with engine(picture_checkpoint("smolvlm"), max_model_len=512, kv_cache_memory_bytes=2**22) as (llm, _):
        run(llm, main)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_ends_its_request_alone(name: str, used: ImageEncoder) -> None:
    make, message = HOSTILE[name]
    content = make()
    with pytest.raises(ValueError, match=message) as error:
        used.encode(content)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300
    process = used._processing._process
    assert process is not None
    assert peak_bytes(process.pid) < processing.MEMORY_BYTES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_an_unusual_image_is_what_viewers_show(name: str) -> None:
    make, size, color = RIGHT[name]
    image = decode(make())
    assert (image.mode, image.size) == ("RGB", size)
    found = image.getpixel((size[0] // 2, size[1] // 2))
    assert isinstance(found, tuple)
    assert max(abs(a - b) for a, b in zip(found, color, strict=True)) <= 2, found


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "corner"),
    list(enumerate(((0, 0), (1, 0), (1, 1), (0, 1), (0, 0), (1, 0), (1, 1), (0, 1)), 1)),
)
def test_exif_turns_an_image(kind: str, orientation: int, corner: tuple[int, int]) -> None:
    stored = Image.new("RGB", (64, 32), "white")
    stored.paste(RED, (0, 0, 16, 16))
    exif, file = Image.Exif(), BytesIO()
    exif[0x0112] = orientation
    stored.save(file, kind, exif=exif)
    image = decode(file.getvalue())
    assert image.size == ((64, 32) if orientation < 5 else (32, 64))
    width, height = image.size
    red = [(x, y) for x in (0, 1) for y in (0, 1)
           if image.getpixel((x * (width - 9) + 4, y * (height - 9) + 4))[1] < 100]  # type: ignore[index] # fmt: skip
    assert red == [corner]


def test_a_decoder_that_hangs_or_dies_ends_one_request(used: ImageEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    used.encode(image_of(28, 28, 999))
    assert used._processing._process is not None
    os.kill(used._processing._process.pid, 9)
    used._processing._process.wait()
    assert used.encode(image_of(28, 28, 998)).parts
    monkeypatch.setattr(processing, "SECONDS", 0.01)
    with pytest.raises(ValueError, match="s of processor time, or crashes"):
        used.encode(png(6000, 5999))
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), r"array \[4, 4, 3\] of float32"),
        (np.zeros((4, 4), np.uint8), r"array \[4, 4\] of uint8"),
        (Image.open(BytesIO(noise("PNG")[:4000])), "truncated"),
        (Image.new("F", (4, 4)), "32 bits"),
        ("/etc/passwd", "it is str"),
        (None, "it is NoneType"),
        ([[1, 2]], "it is list"),
    ],
    ids=["floats", "two dimensions", "truncated", "32 bits", "a path", "none", "lists"],
)  # fmt: skip
def test_what_is_no_image_is_named(image: Any, message: str, used: ImageEncoder) -> None:
    with pytest.raises(ValueError, match=message):
        used.encode(image)


def test_an_image_that_cannot_be_used_is_named_by_its_place(encoder: ImageEncoder) -> None:
    place = encoder._family.placeholder_id
    with pytest.raises(RequestError, match=f"image 2 cannot be used: it is {NO_IMAGE}"):
        encoder.insert([5, place, 6, place], [saved("PNG"), b"x"])
    with pytest.raises(RequestError, match=r"has 3 images; limit_mm_per_prompt allows 2"):
        encoder.insert([place] * 3, [saved("PNG")] * 3)
    with pytest.raises(RequestError, match=r"has 1 images for 2 times <image> in the prompt"):
        encoder.insert([place] * 2, [saved("PNG")])
