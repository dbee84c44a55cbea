"""Images whose hidden states are given: the same tokens as with the images themselves, and what is rejected."""

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.encoders.embeds import ImageEmbeds, read_embeds
from quire_engine.encoders.family import as_arrays, find_family, load_processor
from quire_engine.encoders.image_encoder import ImageEncoder
from quire_engine.errors import RequestError
from quire_engine.frontend.image_parts import decode_media, split_images
from quire_engine.frontend.tokenizer import load_tokenizer
from support.pictures import PICTURES, image_of
from support.ranks import llm_of_thread_ranks

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 2**23}
NAMES = ["gemma3", "gemma4", "idefics3", "internvl", "llava", "llava_next", "mistral3", "qwen3-vl"]
IMAGES = [image_of(40, 90), image_of(60, 28, seed=1)]


def states_of(encoder: ImageEncoder, image: Any) -> npt.NDArray[np.float32]:
    parts = encoder.encode(image).parts
    number = sum(part.length for part in parts)
    return np.frombuffer(b"".join(part.tensor for part in parts), np.float32).reshape(number, -1)


def sizes_of(folder: Path, image: Any) -> dict[str, Any]:
    """What transformers' image processor says of an image's size, where the states alone do not say it."""
    family = find_family(folder)
    assert family is not None
    assert family.size_names is not None
    arrays = as_arrays(load_processor(family, folder)(images=[image], return_tensors="np", **family.arguments))
    return {name: arrays[name] for name in family.size_names}


def generate(llm: LLM, text: str, images: Any) -> Any:
    (output,) = llm.generate([{"prompt": text, "multi_modal_data": {"image": images}}], GREEDY, use_tqdm=False)
    return output


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_that_of_the_images(name: str, picture_checkpoint: Callable[[str], Path]) -> None:
    folder = picture_checkpoint(name)
    with llm_of_thread_ranks(folder, **SETTINGS) as llm:
        encoder = llm._inputs.images
        assert encoder is not None
        text = "a {0} b {0} c".format(PICTURES[name].get("around", "{}").format(encoder.placeholders["image"]))
        expected = generate(llm, text, IMAGES)
        encoder.take_stats()
        states = [states_of(encoder, image) for image in IMAGES]
        encoder.take_stats()
        given = [{"image_embeds": own, **sizes_of(folder, image)} for own, image in zip(states, IMAGES, strict=True)]
        found = generate(llm, text, given)
        assert found.num_cached_tokens < expected.prompt_token_ids.index(encoder._family.image_token_id) + 16, (
            "states that a client gives are not those of an image that the tower encodes"
        )
        mixed = generate(llm, text, [IMAGES[0], given[1]])
        again = generate(llm, text, [{**one, "image_embeds": torch.tensor(one["image_embeds"])} for one in given])
        assert again.num_cached_tokens >= len(found.prompt_token_ids) - 16, "equal states share blocks"
        for output in (found, mixed, again):
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert output.outputs == expected.outputs
        stats = encoder.take_stats()
        assert stats is not None
        assert (len(stats.encode_seconds), stats.num_cached) == (0, 1), "of the one image"
        if given[0].keys() == {"image_embeds"}:
            assert generate(llm, text, states).outputs == expected.outputs
            if len(states[0]) == len(states[1]):
                assert generate(llm, text, torch.from_numpy(np.stack(states))).outputs == expected.outputs
        other = generate(llm, text, [{**one, "image_embeds": -one["image_embeds"]} for one in given])
        assert other.outputs != expected.outputs
        with pytest.raises(RequestError, match=r"image_embeds has rows of 5 numbers; those of this model have \d+"):
            generate(llm, text, [{**one, "image_embeds": one["image_embeds"][:, :5]} for one in given])
        assert generate(llm, text, IMAGES).outputs == expected.outputs


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_travel_in_messages_and_to_the_server(dtype: torch.dtype) -> None:
    rows, grid = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype), torch.tensor([[1, 4, 6]])
    parts: list[Any] = [
        {"image_embeds": saved(rows), "image_grid_thw": saved(grid)},
        {"image_embeds": rows, "image_grid_thw": [1, 4, 6]}, {"image_embeds": rows[None], "image_grid_thw": grid},
        saved(rows), rows,
    ]  # fmt: skip
    content = [{"type": "image_embeds", "image_embeds": part} for part in parts]
    split, images = split_images([{"role": "user", "content": content}])
    assert split == [{"role": "user", "content": [{"type": "image"}] * 5}]
    for number, image in enumerate(images):
        assert isinstance(image, ImageEmbeds)
        for found in (image, decode_media(image.text.encode())):
            assert isinstance(found, ImageEmbeds)
            assert (found.rows == rows.float().numpy()).all()
            sizes = {name: value.tolist() for name, value in found.sizes.items()}
            assert sizes == ({"image_grid_thw": [[1, 4, 6]]} if number < 3 else {})


@pytest.mark.parametrize("text", [b"{", b'{"image_embeds": 5}', b'{"image_embeds": "\xff"}'])
def test_a_text_that_is_no_such_json_is_named(text: bytes) -> None:
    with pytest.raises(ValueError, match="image_embeds are no JSON object of texts: "):
        decode_media(text)


@pytest.fixture(scope="module")
def encoders(picture_checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], ImageEncoder]]:
    made: dict[str, ImageEncoder] = {}

    def get(name: str) -> ImageEncoder:
        if name not in made:
            folder = picture_checkpoint(name)
            family = find_family(folder)
            assert family is not None
            made[name] = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", 2)
        return made[name]

    yield get
    for encoder in made.values():
        encoder.shutdown()


ROWS = np.ones((6, 64), np.float32)
GRID = "image_grid_thw"
WRONG: dict[str, tuple[Any, str]] = {
    "no rows": ({GRID: [1, 4, 6]}, "image_embeds is NoneType; it must be a tensor"),
    "a list": ({"image_embeds": [[0.5]], GRID: [1, 4, 6]}, "image_embeds is list"),
    "one dimension": ({"image_embeds": ROWS[0], GRID: [1, 4, 6]}, r"has shape \[64\]"),
    "empty": ({"image_embeds": ROWS[:0], GRID: [1, 4, 6]}, r"has shape \[0, 64\]"),
    "integers": ({"image_embeds": ROWS.astype(np.int64), GRID: [1, 4, 6]}, "has dtype int64"),
    "not finite": ({"image_embeds": ROWS * np.inf, GRID: [1, 4, 6]}, "not finite"),
    "no grid": (ROWS, "nothing is beside image_embeds; it must be image_grid_thw"),
    "another name": ({"image_embeds": ROWS, "rows": [1], GRID: [1, 4, 6]}, f"{GRID}, rows is beside image_embeds"),
    "no name": ({"image_embeds": ROWS, 5: [1]}, "5 is .* beside image_embeds; it must be the integers of one image"),
    "floats": ({"image_embeds": ROWS, GRID: [1, 4, 6.5]}, "the integers of one image"),
    "two images": ({"image_embeds": ROWS, GRID: [[1, 4, 6]] * 2}, "the integers of one image"),
    "text": ({"image_embeds": ROWS, GRID: "1"}, "the integers of one image"),
    "ragged": ({"image_embeds": ROWS, GRID: [[1], [4, 6]]}, "the integers of one image"),
    "large numbers": ({"image_embeds": ROWS, GRID: [1, 4, 10**30]}, "the integers of one image"),
    "a large grid": ({"image_embeds": ROWS, GRID: [2**20, 2**20, 2**20]}, "is none of an image with 6 hidden states"),
    "a grid below 0": ({"image_embeds": ROWS, GRID: [1, -4, -6]}, "is none of an image with 6 hidden states"),
    "a grid of two": ({"image_embeds": ROWS, GRID: [4, 6]}, "is none of an image with 6 hidden states"),
    "another grid": ({"image_embeds": ROWS, GRID: [1, 4, 4]}, "it has 6 hidden states for 4 tokens"),
    "no grid at all": ({"image_embeds": ROWS, GRID: [1, 0, 0]}, "it has 6 hidden states for 0 tokens"),
}  # fmt: skip
"""Of Qwen3-VL. Name → what is given, and what the error says."""


@pytest.mark.parametrize("name", WRONG)
def test_what_are_no_hidden_states_is_named(name: str, encoders: Callable[[str], ImageEncoder]) -> None:
    given, message = WRONG[name]
    with pytest.raises(RequestError, match=message) as error:
        encoders("qwen3-vl").encode(read_embeds(given))
    assert error.value.parameter in ("multi_modal_data", "image_embeds")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("llava_next", {}, "is none of an image with 6 hidden states"),
        ("llava", {}, "it has 6 hidden states for 16 tokens"),
        ("gemma3", {}, "it has 6 hidden states for 4 tokens"),
        ("internvl", {}, "it has 6 hidden states for 4 tokens"),
        ("idefics3", {"rows": [0], "cols": [0]}, "is none of an image"),
        ("idefics3", {"rows": [2**40], "cols": [0]}, "is none of an image"),
        ("idefics3", {"rows": [2**40], "cols": [2**40]}, "is none of an image"),
        ("mistral3", {"image_sizes": [7 * 2**40, 1]}, "is none of an image"),
        ("deepseek_vl", {}, "holds image_embeds, which this model does not take; give images"),
    ],
)
def test_numbers_that_no_image_of_a_family_has(
    name: str, sizes: dict[str, Any], message: str, encoders: Callable[[str], ImageEncoder]
) -> None:
    with pytest.raises(RequestError, match=message):
        encoders(name).encode(read_embeds({"image_embeds": ROWS, **sizes}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("%%%", "it is not base64"),
        (base64.b64encode(b"x" * 99).decode(), "neither a file of torch.save nor of safetensors"),
        ({"image_embeds": saved(torch.ones(2, 3, dtype=torch.int64))}, "has dtype int64"),
        ({"image_embeds": saved(torch.ones(2, 3)), GRID: saved(torch.ones(1, 3))}, "the integers of one image"),
        (5, "image_embeds is int"),
        ([], "image_embeds is list"),
        (None, "image_embeds holds no image"),
    ],
)
def test_parts_that_hold_no_hidden_states_are_named_by_their_place(value: Any, message: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_embeds", "image_embeds": value}]
    with pytest.raises(RequestError, match=rf"messages\[0\]\.content\[1\].*{message}") as error:
        split_images([{"role": "user", "content": content}])
    assert error.value.parameter == "messages"
