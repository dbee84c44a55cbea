"""What is sent: requests of random lengths, with shared prefixes or images, or of a ShareGPT file.

Random prompts are token ids, or text where an endpoint takes no ids. Their sense does not matter to what an engine
computes, and no cache or draft guesses them. The ids are those of a tokenizer's vocabulary where one is given, else of
the few hundred that every vocabulary has.
"""

import ast
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

FIRST_ID, END_ID = 2, 256
"""Of random tokens without a tokenizer: below are special tokens, and every byte-level vocabulary has these."""
MIXED_INPUT, MIXED_OUTPUT = (32, 256), (16, 128)
"""Bounds of the lengths of `mixed`, which the project's own benchmarks measure, too; the upper one is excluded."""
SHAREGPT_TOKENS, SHAREGPT_PROMPT_TOKENS, SHAREGPT_ALL_TOKENS = 4, 1024, 2048
"""As `vllm bench serve` does, conversations are passed over that have fewer in prompt or answer, or more of either."""
JPEG_SIDES = range(1, 65501)
"""Pixels that libjpeg takes."""
VIDEO_FRAMES = range(1, 769)
"""That the server takes."""
_WORDS = (  # noqa: SIM905 (a list of them would fill the page)
    "the cache holds blocks of keys and values while a request runs and its prefix may serve another one later on "
    "def class return import for in range if else value list number text line file open read write print"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One request."""

    prompt: str | list[int]
    max_tokens: int
    """How many tokens are asked for."""
    images: Sequence[bytes | Sequence[bytes]] = ()
    """JPEG files beside the text; several together are the frames of a video."""
    slo_class: str = ""
    """Empty: the model's default."""
    lora_name: str = ""
    """Empty: no adapter."""

    @property
    def names(self) -> dict[str, str]:
        """The parameters that it names its class and its adapter by."""
        said = {"slo_class": self.slo_class, "lora_name": self.lora_name}
        return {name: value for name, value in said.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetOptions:
    """Which requests, under the names of `vllm bench serve`. Lengths are in tokens. The texts are those of `--help`."""

    dataset_name: Annotated[str, "mixed, random, random-mm, prefix_repetition or sharegpt."] = "mixed"
    dataset_path: Annotated[Path | None, "The file of sharegpt."] = None
    random_input_len: Annotated[int, "Of random: tokens per prompt."] = 1024
    random_output_len: Annotated[int, "Of random: tokens per answer."] = 128
    random_range_ratio: Annotated[float, "Lengths vary by this share, up and down."] = 0.0
    random_prefix_len: Annotated[int, "Tokens that all prompts begin with, besides."] = 0
    random_mm_base_items_per_request: Annotated[int, "Of random-mm: images and videos per request."] = 1
    random_mm_bucket_config: Annotated[
        str, "Of random-mm: sizes and their shares, {(height, width, frames): share, ...}; 1 frame is an image."
    ] = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
    sharegpt_output_len: Annotated[int | None, "Tokens per answer; default: the file's."] = None
    prefix_repetition_prefix_len: Annotated[int, "Tokens of each shared prefix."] = 256
    prefix_repetition_suffix_len: Annotated[int, "Tokens of a prompt's own."] = 256
    prefix_repetition_num_prefixes: Annotated[int, "Different prefixes."] = 10
    prefix_repetition_output_len: Annotated[int, "Tokens per answer."] = 128

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ValueError(f"dataset_name is {self.dataset_name!r}; it must be one of {', '.join(DATASETS)}")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio is {self.random_range_ratio}; it must be at least 0 and below 1")
        for name in self.__dataclass_fields__:
            value, least = (
                getattr(self, name),
                0 if name in ("random_prefix_len", "prefix_repetition_prefix_len") else 1,
            )
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        _image_sizes(self.random_mm_bucket_config)
        if self.dataset_path is None and self.dataset_name == "sharegpt":
            raise ValueError(f"dataset_path is not given; dataset_name {self.dataset_name} reads it")


class PromptMaker:
    """Makes random prompts of so many tokens, and counts those of a text.

    Args:
        tokenizer: a checkpoint's folder, or its tokenizer.json; unset: ids that every vocabulary has, and words.
        as_text: for endpoints that take no ids. Without a tokenizer a word is taken for a token.

    Raises:
        ValueError: there is no such tokenizer, or it cannot be read.
    """

    def __init__(self, tokenizer: Path | None = None, *, as_text: bool = False) -> None:
        self.as_text = as_text
        self._tokenizer: Any = None if tokenizer is None else _load_tokenizer(tokenizer)
        if self._tokenizer is not None:
            self._ids = range(FIRST_ID, self._tokenizer.get_vocab_size(with_added_tokens=False))
        else:
            self._ids = range(len(_WORDS)) if as_text else range(FIRST_ID, END_ID)

    def ids(self, rng: random.Random, length: int) -> list[int]:
        """Random tokens; without a tokenizer, of a prompt that is to be text, numbers of words."""
        return rng.choices(self._ids, k=length)

    def prompt(self, ids: list[int]) -> str | list[int]:
        """Such tokens as an endpoint takes them."""
        if not self.as_text:
            return ids
        if self._tokenizer is None:
            return " ".join(_WORDS[id_] for id_ in ids)
        return str(self._tokenizer.decode(ids))

    def count(self, text: str) -> int | None:
        """Tokens of a text; None without a tokenizer."""
        return None if self._tokenizer is None else len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def make_requests(options: DatasetOptions, prompts: PromptMaker, num_prompts: int, seed: int) -> list[SampleRequest]:
    """The requests, always the same for the same arguments.

    Raises:
        ValueError: a file cannot be read, is not of its format, or holds too few.
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts is {num_prompts}; it must be at least 1")
    make = DATASETS[options.dataset_name]
    found = make(options, prompts, random.Random(f"{options.dataset_name} {seed}"))
    requests = list(islice(found, num_prompts))
    if len(requests) < num_prompts:
        raise ValueError(f"num_prompts is {num_prompts}; {options.dataset_path} holds {len(requests)} that can be sent")
    return requests


def with_slo_classes(requests: Sequence[SampleRequest], weights: Mapping[str, float], seed: int) -> list[SampleRequest]:
    """The same requests, each of a class drawn by these weights."""
    names = _drawn(len(requests), weights, f"classes {seed}")
    return [replace(request, slo_class=name) for request, name in zip(requests, names, strict=True)]


def with_adapters(requests: Sequence[SampleRequest], weights: Mapping[str, float], seed: int) -> list[SampleRequest]:
    """The same requests, each with a LoRA adapter drawn by these weights."""
    names = _drawn(len(requests), weights, f"adapters {seed}")
    return [replace(request, lora_name=name) for request, name in zip(requests, names, strict=True)]


def _drawn(number: int, weights: Mapping[str, float], seed: str) -> list[str]:
    return random.Random(seed).choices(list(weights), list(weights.values()), k=number) if weights else [""] * number


def _mixed(options: DatasetOptions, prompts: PromptMaker, rng: random.Random) -> Iterator[SampleRequest]:
    while True:
        ids = prompts.ids(rng, rng.randrange(*MIXED_INPUT))
        yield SampleRequest(prompt=prompts.prompt(ids), max_tokens=rng.randrange(*MIXED_OUTPUT))


def _random(options: DatasetOptions, prompts: PromptMaker, rng: random.Random) -> Iterator[SampleRequest]:
    def length(mean: int) -> int:
        spread = int(mean * options.random_range_ratio)
        return max(1, rng.randint(mean - spread, mean + spread))

    prefix = prompts.ids(rng, options.random_prefix_len)
    while True:
        ids = prefix + prompts.ids(rng, length(options.random_input_len))
        yield SampleRequest(prompt=prompts.prompt(ids), max_tokens=length(options.random_output_len))


def _random_mm(options: DatasetOptions, prompts: PromptMaker, rng: random.Random) -> Iterator[SampleRequest]:
    """Requests of `random`, each with images or videos of random pixels."""
    if not prompts.as_text:
        raise ValueError(
            "dataset_name is 'random-mm', whose images are parts of a chat's message; use quire bench serve with "
            "backend openai-chat"
        )
    sizes = _image_sizes(options.random_mm_bucket_config)
    for request in _random(options, prompts, rng):
        chosen = rng.choices(list(sizes), list(sizes.values()), k=options.random_mm_base_items_per_request)
        yield replace(request, images=[_random_media(rng, *size) for size in chosen])


def _random_media(rng: random.Random, height: int, width: int, num_frames: int) -> bytes | list[bytes]:
    frames = [_random_image(rng, height, width) for _ in range(num_frames)]
    return frames if num_frames > 1 else frames[0]


def _image_sizes(text: str) -> dict[tuple[int, int, int], float]:
    """(height, width, frames) in pixels → share, of the form of vLLM's option.

    Raises:
        ValueError: it is not of that form.
    """
    try:
        buckets = {size: float(share) for size, share in ast.literal_eval(text).items() if share}
        is_sound = bool(buckets) and all(
            0 < share < math.inf and frames in VIDEO_FRAMES and height in JPEG_SIDES and width in JPEG_SIDES
            for (height, width, frames), share in buckets.items()
        )
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ValueError(
            f"random_mm_bucket_config is {text[:120]!r}; it must be {{(height, width, frames): share, ...}} with sides "
            f"of 1 to {JPEG_SIDES[-1]} pixels, 1 to {VIDEO_FRAMES[-1]} frames and a share above 0, as in "
            "{(256, 256, 1): 0.8, (256, 256, 8): 0.2}"
        )
    return {(int(height), int(width), int(frames)): share for (height, width, frames), share in buckets.items()}


def _random_image(rng: random.Random, height: int, width: int) -> bytes:
    """A JPEG file of noise, as vLLM's: no cache of images has it."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(3 * height * width)).save(file, "JPEG")
    return file.getvalue()


def _prefix_repetition(options: DatasetOptions, prompts: PromptMaker, rng: random.Random) -> Iterator[SampleRequest]:
    prefixes = [
        prompts.ids(rng, options.prefix_repetition_prefix_len) for _ in range(options.prefix_repetition_num_prefixes)
    ]
    while True:
        ids = rng.choice(prefixes) + prompts.ids(rng, options.prefix_repetition_suffix_len)
        yield SampleRequest(prompt=prompts.prompt(ids), max_tokens=options.prefix_repetition_output_len)


def _sharegpt(options: DatasetOptions, prompts: PromptMaker, rng: random.Random) -> Iterator[SampleRequest]:
    """The first question of each conversation, with as many tokens as its answer has."""
    assert options.dataset_path is not None
    pairs = list(_conversations(options.dataset_path))
    rng.shuffle(pairs)
    for prompt, answer in pairs:
        prompt_len, answer_len = prompts.count(prompt), prompts.count(answer)
        output_len = options.sharegpt_output_len or answer_len
        if output_len is None:
            raise ValueError(
                "sharegpt_output_len and tokenizer are both not given; one of them says how long answers are"
            )
        if prompt_len is not None and not (
            SHAREGPT_TOKENS <= prompt_len <= SHAREGPT_PROMPT_TOKENS
            and SHAREGPT_TOKENS <= output_len <= SHAREGPT_ALL_TOKENS - prompt_len
        ):
            continue
        yield SampleRequest(prompt=prompt, max_tokens=output_len)


def _conversations(path: Path) -> Iterator[tuple[str, str]]:
    """First question and answer of each conversation that has both."""
    try:
        entries = json.loads(_read(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not ShareGPT's format: it must be a list of conversations")
    for number, entry in enumerate(entries):
        try:
            turns = [turn["value"] for turn in entry["conversations"][:2]]
        except (TypeError, KeyError):
            turns = None
        if turns is None or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f"{path}: entry {number} is not ShareGPT's format: "
                '"conversations" must be a list of {"from": …, "value": …}'
            )
        if len(turns) == 2 and all(turns):
            yield turns[0], turns[1]


DATASETS: dict[str, Callable[[DatasetOptions, PromptMaker, random.Random], Iterator[SampleRequest]]] = {
    "mixed": _mixed,
    "random": _random,
    "random-mm": _random_mm,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
}
"""By name. Those of random prompts have no end."""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset_path {path} cannot be read: {error}") from None


def _load_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer is {path}; it must be a checkpoint's folder with a tokenizer.json, or that file")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer {file} cannot be read: {error}") from None
