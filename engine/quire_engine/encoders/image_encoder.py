"""ImageEncoder: images and videos → the tokens and prompt parts that they are in a prompt. Thread-safe.

The two processes and this one share memory that is no file of any folder (`memfd_create`), one for each image in work::

    content │ arrays of its pixels │ hidden states
            ▲ processing writes    ▲ the tower writes

Each process reads what stands before, so that another can repeat its job if it is killed. Two images are in work: one
is decoded while the tower encodes the one before. Images are taken in the order of their arrival, and a prompt has two
in the queue at a time, so that one with many images does not keep others waiting.
"""

import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire_engine.config import EngineConfig
from quire_engine.config.frontend_config import DEFAULT_MM_LIMITS
from quire_engine.encoders import processing, tower_process
from quire_engine.encoders.content import content_of, unusable
from quire_engine.encoders.embeds import ROWS, ImageEmbeds
from quire_engine.encoders.families.base import ImageFamily, NoImagesError
from quire_engine.encoders.family import (
    PROCESSOR_FILES,
    find_family,
    has_processor,
    processor_settings,
    read_video_settings,
)
from quire_engine.encoders.video import NO_VIDEOS, Video
from quire_engine.errors import EngineDeadError, EngineError, EngineUnavailableError, RequestError, cut
from quire_engine.messages import PromptPart
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.stats import ImageStats
from quire_engine.system.limited_process import LimitedProcess

logger = logging.getLogger(__name__)

IMAGES_IN_WORK = 2
"""One is decoded while the tower encodes the one before."""
CACHE_BYTES = 256 << 20
"""Bytes for the hidden states of images that were encoded last."""
TOWER_SECONDS = 600.0
"""After which a tower that neither loads its weights nor encodes an image is killed."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """What an image is in a prompt."""

    token_ids: list[int]
    """Tokens in the place of its placeholder."""
    parts: list[PromptPart]
    """From position 0 of these on."""
    around: tuple[str, str] = ("", "")
    """Text before and after, whose tokens depend on what is beside it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its hidden states."""
        return sum(len(part.tensor) for part in self.parts)


class ImageEncoder:
    """Encodes images of prompts.

    Args:
        folder: the checkpoint.
        family: its own.
        tokenizer: its own.
        dtype: of the tower's weights, as torch names it.
        device: of the tower: `cpu`, `cuda:0`, or `auto:0`, which is the CPU where torch finds no GPU.
        max_images, max_videos: of one prompt.
        quantization: the setting, which holds for the tower as well.
    """

    def __init__(
        self, folder: Path, family: ImageFamily, tokenizer: Any, dtype: str, device: str, max_images: int,
        quantization: str | None = None, max_videos: int = DEFAULT_MM_LIMITS["video"],
    ) -> None:  # fmt: skip
        self._family, self._tokenizer = family, tokenizer
        self._limits = {"image": max_images, "video": max_videos}
        self._lock = threading.Lock()
        """Guards the cache, the images in work and the statistics."""
        self._stats = ImageStats()
        self._is_closed = False
        self._memories = [os.memfd_create("quire-images", os.MFD_CLOEXEC) for _ in range(IMAGES_IN_WORK)]
        self._free: SimpleQueue[int] = SimpleQueue()
        for memory in self._memories:
            self._free.put(memory)
        self._processing = LimitedProcess(processing.__name__, os.fspath(folder), self._memories)
        self._tower = LimitedProcess(
            tower_process.__name__, [os.fspath(folder), dtype, device, quantization], self._memories, TOWER_SECONDS
        )
        self._turns = {self._processing: threading.Lock(), self._tower: threading.Lock()}
        self._threads = ThreadPoolExecutor(IMAGES_IN_WORK, thread_name_prefix="encode-image")
        self._pending: dict[bytes, Future[EncodedImage]] = {}
        """By digest."""
        video_id = _video_token_id(family, tokenizer)
        settings = [processor_settings(folder), {} if video_id is None else read_video_settings(folder)]
        named = f"{family.processor} {dtype} {quantization} {json.dumps(settings, sort_keys=True)}"
        self._namespace = hashlib.sha256(named.encode()).digest()
        self._cache: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._placeholder_ids = {"image": family.placeholder_id}
        self._state_ids = {family.image_token_id, *family.other_state_ids}
        if video_id is not None:
            self._placeholder_ids["video"] = video_id
            self._state_ids |= {video_id}
        self.placeholders: dict[str, str] = {
            kind: tokenizer.convert_ids_to_tokens([token_id])[0] for kind, token_id in self._placeholder_ids.items()
        }
        """The text that stands for an image in a prompt, and that for a video if the model takes any."""
        self._image_token: str = tokenizer.convert_ids_to_tokens([family.image_token_id])[0]
        # The libraries are imported and the weights loaded while the engine starts, or serves text.
        threading.Thread(target=self._load, name="load-tower", daemon=True).start()

    def _load(self) -> None:
        self._processing.start()
        try:
            self._ask_tower(tower_process.Job())
        except RequestError as error:
            logger.error("%s", error)
        except EngineError:
            pass  # it is logged, and the next image tries again

    def insert(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], list[PromptPart]]:
        """Token ids with each placeholder replaced by the tokens of its image or video, and the parts.

        Args:
            token_ids: of the prompt.
            images: in the order of their placeholders: files as bytes, Pillow's images, arrays [height, width, 3] of
                uint8, or `ImageEmbeds`; and `Video`s, in the order of theirs.

        Raises:
            RequestError: there are not as many placeholders as images, or one cannot be used.
            EngineUnavailableError: a process died; the same images may be encoded later.
            EngineDeadError: the encoder was shut down.
        """
        own = {
            "video": [image for image in images if isinstance(image, Video)],
            "image": [image for image in images if not isinstance(image, Video)],
        }
        for kind, given in own.items():
            self._check_number(kind, len(given), token_ids)
        kinds = {token_id: kind for kind, token_id in self._placeholder_ids.items()}
        queues = {kind: iter(given) for kind, given in own.items()}
        ordered = [next(queues[kinds[token_id]]) for token_id in token_ids if token_id in kinds]
        found: list[int] = []
        parts: list[PromptPart] = []
        text: list[int] = []
        before = ""
        encoded = self._encode_all(ordered)
        for token_id in token_ids:
            if token_id not in kinds:
                text.append(token_id)
                continue
            image = next(encoded)
            found += self._join(before, text, image.around[0])
            start = len(found)
            parts += [msgspec.structs.replace(part, start=start + part.start) for part in image.parts]
            found += image.token_ids
            text, before = [], image.around[1]
        return found + self._join(before, text, ""), parts

    def _check_number(self, kind: str, number: int, token_ids: Sequence[int]) -> None:
        """Raises RequestError if there are more images or videos than are allowed, or than placeholders, or fewer."""
        if number and kind not in self._placeholder_ids:
            raise RequestError("multi_modal_data", f"multi_modal_data holds a {kind}, which {NO_VIDEOS}")
        if number > self._limits[kind]:
            raise RequestError(
                "multi_modal_data",
                f"multi_modal_data has {number} {kind}s; limit_mm_per_prompt allows {self._limits[kind]}",
            )
        if kind in self._placeholder_ids and number != (places := token_ids.count(self._placeholder_ids[kind])):
            raise RequestError(
                "multi_modal_data",
                f"multi_modal_data has {number} {kind}s for {places} times {self.placeholders[kind]} in the prompt; it "
                "must have one for each",
            )

    def _encode_all(self, images: Sequence[Any]) -> Iterator[EncodedImage]:
        """In their order. The next ones are in the queue while one is waited for."""
        pending: deque[tuple[int, Future[EncodedImage]]] = deque()
        for position in range(len(images) + IMAGES_IN_WORK - 1):
            which = position
            try:
                if position < len(images):
                    pending.append((position, self._submit(images[position])))
                if position < IMAGES_IN_WORK - 1:
                    continue
                which, future = pending.popleft()
                image = future.result()
            except RequestError as error:
                reason = str(error)
                for kind in ("image", "video") if len(images) > 1 else ():
                    reason = re.sub(rf"\ban? {kind}\b", f"{kind} {which + 1}", reason, count=1)
                raise RequestError("multi_modal_data", reason) from None
            yield image

    def _join(self, before: str, token_ids: list[int], after: str) -> list[int]:
        """Token ids with text before and after them, as the tokenizer has them in one text."""
        if not before and not after:
            return token_ids
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if encode(text) == token_ids:
            return list(encode(f"{before}{text}{after}"))
        return [*encode(before), *token_ids, *encode(after)]  # they are not the tokenizer's, or their text is not

    def encode(self, image: Any) -> EncodedImage:
        """Encode an image, or find it in the cache. Raises what `insert` raises."""
        return self._submit(image).result()

    def _submit(self, image: Any) -> "Future[EncodedImage]":
        """Put an image into the queue, unless it is there or in the cache, or its hidden states are given."""
        if isinstance(image, ImageEmbeds):
            given: Future[EncodedImage] = Future()
            given.set_result(self._place(image))
            return given
        content, job = content_of(image)
        digest = hashlib.sha256(self._namespace + msgspec.json.encode(job))
        digest.update(content)
        key = digest.digest()
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine was shut down")
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                future: Future[EncodedImage] = Future()
                future.set_result(found)
            elif key not in self._pending:
                future = self._pending[key] = self._threads.submit(self._encode_and_keep, content, job, key)
                return future
            else:
                future = self._pending[key]
            self._stats.num_cached += 1
        return future

    def take_stats(self) -> ImageStats | None:
        """The images since this was last called; None if there were none."""
        if self._stats == ImageStats():
            return None
        with self._lock:
            stats, self._stats = self._stats, ImageStats()
        return stats

    def _encode_and_keep(self, content: bytes, job: processing.Job, digest: bytes) -> EncodedImage:
        try:
            found, seconds = self._encode(content, job, digest)
        except BaseException:
            with self._lock:
                self._stats.num_failed += 1
                del self._pending[digest]
            raise
        with self._lock:
            self._stats.encode_seconds.append(seconds)
            del self._pending[digest]
            self._cache[digest] = found
            total = sum(one.num_bytes for one in self._cache.values())
            while total > CACHE_BYTES and len(self._cache) > 1:
                total -= self._cache.popitem(last=False)[1].num_bytes
        return found

    def _encode(self, content: bytes, job: processing.Job, digest: bytes) -> tuple[EncodedImage, float]:
        """And the seconds that it took, without the wait for other images."""
        memory = self._free.get()
        try:
            os.pwrite(memory, content, 0)
            answer, seconds = self._ask(self._processing, msgspec.structs.replace(job, memory=memory), "decodes")
            prepared = msgspec.json.decode(answer, type=processing.Prepared)
            if prepared.error is not None:
                raise unusable(prepared.error, job)
            encoded, tower_seconds = self._ask_tower(
                tower_process.Job(memory=memory, start=len(content), num_bytes=prepared.num_bytes)
            )
            num_states, width = encoded.shape
            found = os.pread(memory, 4 * num_states * width, len(content) + prepared.num_bytes)
            states = np.frombuffer(found, np.float32).reshape(-1, width)
        finally:
            os.ftruncate(memory, 0)
            self._free.put(memory)
        if job.frame_bytes is None:
            return self._place_image(prepared.layout, states, digest), seconds + tower_seconds
        before, text, grid, frame_interval, after = self._family.expand_video(
            prepared.layout, prepared.seconds, prepared.fps, self._image_token, self.placeholders["video"]
        )
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        parts = self._parts(token_ids, states, digest, grid, frame_interval, job)
        return EncodedImage(token_ids, parts, (before, after)), seconds + tower_seconds

    def _place(self, image: ImageEmbeds) -> EncodedImage:
        """What an image is whose hidden states are given. Raises RequestError if they are those of no image."""
        names, number = self._family.size_names, len(image.rows)
        if names is None:
            raise RequestError.of("multi_modal_data", f"holds {ROWS}, which this model does not take; give images")
        if set(image.sizes) != set(names):
            found, expected = (", ".join(sorted(own)) or "nothing" for own in (image.sizes, names))
            raise RequestError.because("multi_modal_data", f"{cut(found)} is beside {ROWS}; it must be {expected}")
        try:
            layout = self._family.layout_of_states(number, image.sizes)
            counts = self._family.grid(layout) or layout
            # No more text is made of these than there are states.
            is_right = min(counts, default=0) >= 0 and math.prod(max(count, 1) for count in counts) <= number
        except (ArithmeticError, LookupError, ValueError):
            is_right = False
        if not is_right:
            sizes = cut(", ".join(f"{name}={value.tolist()}" for name, value in image.sizes.items()))
            raise unusable(f"{sizes or 'its size'} is none of an image with {number} hidden states")
        digest = hashlib.sha256(self._namespace + msgspec.json.encode((ROWS, layout)))
        digest.update(image.rows.data)
        return self._place_image(layout, image.rows, digest.digest())

    def _place_image(self, layout: Sequence[int], states: npt.NDArray[np.float32], digest: bytes) -> EncodedImage:
        found, grid, around = self._family.expand(layout, self._image_token), self._family.grid(layout), ("", "")
        if isinstance(found, str):
            around = found[: len(found) - len(found.lstrip())], found[len(found.rstrip()) :]
            found = self._tokenizer.encode(found.strip(), add_special_tokens=False)
        return EncodedImage(list(found), self._parts(found, states, digest, grid, 1.0), around)

    def _parts(
        self, token_ids: list[int], states: npt.NDArray[np.float32], digest: bytes, grid: tuple[int, ...],
        frame_interval: float, job: processing.Job | None = None,
    ) -> list[PromptPart]:  # fmt: skip
        """One for each run of image tokens."""
        if len(states) != (places := sum(map(token_ids.count, self._state_ids))):
            raise unusable(f"it has {len(states)} hidden states for {places} tokens", job)
        if not np.isfinite(states).all():
            raise unusable("its hidden states are not finite", job)
        parts: list[PromptPart] = []
        start = first = 0
        for is_image, run in groupby(token_ids, self._state_ids.__contains__):
            length = len(list(run))
            if is_image:
                own = hashlib.sha256(digest + first.to_bytes(8, "little")).digest()
                tensor = states[first : first + length].tobytes()
                is_bidirectional = self._family.is_bidirectional
                parts.append(PromptPart(start, length, own, tensor, grid, is_bidirectional, frame_interval))
                first += length
            start += length
        return parts

    def _ask_tower(self, job: tower_process.Job) -> tuple[tower_process.Encoded, float]:
        answer, seconds = self._ask(self._tower, job, "encodes")
        encoded = msgspec.json.decode(answer, type=tower_process.Encoded)
        if encoded.error is not None and encoded.is_final:
            raise RequestError("multi_modal_data", f"multi_modal_data holds images; {encoded.error}")
        if encoded.error is not None:
            raise _unavailable(encoded.error)
        return encoded, seconds

    def _ask(self, process: LimitedProcess, job: processing.Job | tower_process.Job, what: str) -> tuple[bytes, float]:
        """The answer to a job, which another process repeats if the first was killed; and the seconds that it took.

        Raises:
            RequestError: the image ended the process that decodes.
            EngineUnavailableError: the process died otherwise, or was killed again.
            EngineDeadError: the encoder was shut down.
        """
        line = msgspec.json.encode(job)
        with self._turns[process]:
            began_at = time.monotonic()
            answer = process.ask(line) or (process.ask(line) if process.was_killed else b"")
            is_job_at_fault = process.is_job_at_fault and process is self._processing
            seconds = time.monotonic() - began_at
        if answer:
            return answer, seconds
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")
        if is_job_at_fault:
            assert isinstance(job, processing.Job)
            raise unusable(f"decoding it takes more than {job.seconds:.0f} s of processor time, or crashes", job)
        raise _unavailable(f"the process that {what} images has died; the next image starts it")

    def shutdown(self) -> None:
        """End the processes. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._processing.shutdown()
        self._tower.shutdown()
        self._threads.shutdown()
        while self._memories:
            os.close(self._memories.pop())


def image_family(config: EngineConfig) -> ImageFamily | None:
    """The family of a checkpoint that takes images; None if it takes none, or `limit_mm_per_prompt` says so, or its
    weights are random ones. Raises CheckpointError if it takes images, but its configuration is bad."""
    if config.model.load_format == "dummy" or not config.frontend.limit_mm_per_prompt["image"]:
        return None
    return find_family(Path(config.model.model))


def make_image_encoder(config: EngineConfig, tokenizer: Any) -> ImageEncoder | str:
    """The encoder of a checkpoint with an `image_family`, if its tokenizer has the tokens; else why prompts may have no
    images."""
    folder, parallel = Path(config.model.model), config.parallel
    try:
        family, reason = image_family(config), ""
    except NoImagesError as error:
        family, reason = None, str(error)
    if family is not None and not has_processor(folder):
        reason = f"{folder} has no {' or '.join(PROCESSOR_FILES)}"
    elif family is not None and None in tokenizer.convert_ids_to_tokens([family.image_token_id, family.placeholder_id]):
        reason = f"the tokenizer of {folder} has no token that stands for images"
    if reason:
        logger.warning("%s: served as text; %s", folder, reason)
    if family is None or reason:
        return reason or "this model takes text alone"
    dtype = config.model.dtype if config.model.dtype != "auto" else Fields(*open_checkpoint(folder).config()).dtype()
    index = parallel.gpu_device_ids[0] if parallel.gpu_device_ids else 0
    device = "cpu" if parallel.device == "cpu" else f"{parallel.device}:{index}"
    limits, quantization = config.frontend.limit_mm_per_prompt, config.model.quantization
    return ImageEncoder(
        folder, family, tokenizer, dtype, device, limits["image"], quantization, max_videos=limits["video"]
    )


def _video_token_id(family: ImageFamily, tokenizer: Any) -> int | None:
    """The token that stands for a video; None: the family takes none, or the tokenizer has no such token."""
    token_id: int | None = family.video_token_id
    if token_id is None and family.video_token:
        token_id = tokenizer.convert_tokens_to_ids(family.video_token)
    token = None if token_id is None else tokenizer.convert_ids_to_tokens([token_id])[0]
    return None if token is None or family.video_token not in ("", token) else token_id


def _unavailable(reason: str) -> EngineUnavailableError:
    logger.error("an image could not be encoded: %s", reason)
    return EngineUnavailableError(f"images cannot be encoded now: {reason}; send the request again later")
