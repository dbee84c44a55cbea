"""Videos in prompts: against transformers in float32, however they are given and computed; and what is rejected."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from quire_engine import LLM, SamplingParams
from quire_engine.encoders.families.idefics3 import in_words
from quire_engine.encoders.family import find_family, load_video_processor
from quire_engine.encoders.image_encoder import ImageEncoder
from quire_engine.encoders.processing import FORMATS, Job, decode_video
from quire_engine.encoders.video import MAX_VIDEO_PIXELS, Video, read_videos
from quire_engine.errors import RequestError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import NewRequestData, PromptPart
from quire_engine.models.step_context import GRID_POSITIONS, StepRows
from quire_engine.worker.batch.input_batch import InputBatch
from support.oracle import load_reference
from support.pictures import PICTURES, expand, expand_video, generate, image_of, video_arrays
from support.ranks import llm_of_thread_ranks
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

Frames = npt.NDArray[np.uint8]
NUM_TOKENS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 768, "kv_cache_memory_bytes": 2**23}
NAMES = [
    "gemma4", "gemma4-e", "glm46v", "glm4v", "glm4v-moe", "internvl", "llava_onevision", "qwen2-vl", "qwen2-5-vl",
    "qwen3-vl", "qwen3-5", "smolvlm",
]  # fmt: skip
START, PAD, VIDEO_PAD, END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
ONE_IMAGE, ONE_VIDEO = f"{START}{PAD}{END}", f"{START}{VIDEO_PAD}{END}"


def video_of(num_frames: int, width: int, height: int, seed: int = 0) -> Frames:
    return np.stack([image_of(width, height, seed=100 * seed + number) for number in range(num_frames)])


LONG, SHORT, STILL = video_of(5, 60, 40), video_of(2, 30, 30, seed=1), video_of(1, 45, 30, seed=2)
IMAGE = image_of(40, 30)
PROMPTS: list[tuple[str, list[Frames], list[tuple[Frames, float]]]] = [
    (f"def f({ONE_VIDEO}):", [], [(LONG, 12.0)]),
    (f"{ONE_VIDEO}{ONE_IMAGE} # {ONE_VIDEO} both\n", [IMAGE], [(SHORT, 8.0), (LONG, 12.0)]),
    (f"a {ONE_VIDEO} b", [], [(STILL, 2.0)]),
]
"""Text, images, and videos with their frames per second."""


def prompt_of(text: str, images: list[Frames], videos: list[tuple[Frames, float]]) -> dict[str, Any]:
    own = {"video": [(frames, {"fps": fps}) for frames, fps in videos]}
    return {"prompt": text, "multi_modal_data": own | ({"image": images} if images else {})}


@pytest.fixture
def folder(name: str, picture_checkpoint: Callable[[str], Path]) -> Path:
    return picture_checkpoint(name)


@pytest.mark.parametrize("name", NAMES)
def test_exact(name: str, folder: Path) -> None:
    tokenizer, prompts, picture = load_tokenizer(folder), PROMPTS, PICTURES[name]["image_token"]
    pad = PICTURES[name].get("video_token", "<video>")
    if not name.startswith("qwen"):
        # transformers takes images and videos in one prompt of Gemma 4, but not of these others.
        prompts = [
            (text.replace(ONE_VIDEO, pad).replace(ONE_IMAGE, picture), images, [(own, fps / 8) for own, fps in videos])
            for text, images, videos in PROMPTS
            if not images or name.startswith("gemma4")
        ]
    with llm_of_thread_ranks(folder, **SETTINGS) as llm:
        outputs = llm.generate([prompt_of(*prompt) for prompt in prompts], GREEDY, use_tqdm=False)
        assert llm.get_stats().num_failed_steps == 0
    model = load_reference(folder)
    for output, (text, images, videos) in zip(outputs, prompts, strict=True):
        expanded = text.replace(picture, expand(name, folder, images[0])) if images else text
        head, *rest = expanded.split(pad)
        for (frames, fps), after in zip(videos, rest, strict=True):
            head += expand_video(name, folder, frames, fps) + after
        assert output.prompt_token_ids == tokenizer.encode(head)
        token_ids, logprobs = generate(folder, output.prompt_token_ids, images, NUM_TOKENS, model, name, videos)
        (completion,) = output.outputs
        assert completion.token_ids == token_ids
        assert completion.logprobs is not None
        found = [entry[i].logprob for entry, i in zip(completion.logprobs, token_ids, strict=True)]
        assert found == pytest.approx(logprobs, abs=1e-4)


def results(llm: LLM, turns: int) -> list[Any]:
    for _ in range(turns):
        outputs = llm.generate([prompt_of(*prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
    if turns > 1:
        assert outputs[0].num_cached_tokens >= 16, "or the prefix cache was not used within a video"
    return [output.outputs for output in outputs]


@pytest.mark.parametrize(
    ("name", "module", "kind", "settings"),
    [
        ("glm4v", "glm4v", "Glm4vVideoProcessor", {"fps": 2, "max_duration": 300}),
        ("glm46v", "glm46v", "Glm46VVideoProcessor", {"temporal_patch_size": 2}),
        ("gemma4", "", "", {"num_frames": 32}),  # transformers' default, which needs no torchvision
    ],
)
def test_frames_of_an_animation_are_those_that_transformers_takes(
    name: str, module: str, kind: str, settings: dict[str, Any], folder: Path
) -> None:
    family = find_family(folder)
    assert family is not None
    for number, fps in [
        (32, 1.0), (40, 30.0), (100, 12.5), (900, 30.0), (1000, 5.0), (3000, 2.0), (3000, 4.0), (9000, 29.97),
        (500, 0.5), (700, 0.25),
    ]:  # fmt: skip
        metadata = VideoMetadata(total_num_frames=number, fps=fps, duration=number / fps)
        if kind:
            expected = theirs(module, kind).sample_frames(SimpleNamespace(**settings), metadata)
        else:
            expected = default_sample_indices_fn(metadata, **settings)
        assert list(family.choose_frames(settings, number, fps)) == sorted({*expected.tolist()}), (number, fps)
    for number, fps in [(1, 1.0), (1, 100.0), (3, 100.0), (5, 1.0)]:  # of which transformers may take none
        found = list(family.choose_frames(settings, number, fps))
        assert found
        assert found == sorted({*found} & {*range(number)})


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl"])
def test_chunks_and_the_prefix_cache_change_no_bit(name: str, folder: Path) -> None:
    with llm_of_thread_ranks(folder, **SETTINGS) as llm:
        expected = results(llm, 1)
    with llm_of_thread_ranks(folder, **SETTINGS, max_num_batched_tokens=7, max_num_seqs=3) as llm:
        assert results(llm, 2) == expected


def saved(kind: str, frames: Frames, duration: int, **options: Any) -> bytes:
    first, *others = (Image.fromarray(frame) for frame in frames)
    file = BytesIO()
    first.save(file, kind, save_all=True, append_images=others, duration=duration, **options)
    return file.getvalue()


def files_of(kind: str, frames: Frames) -> list[bytes]:
    files = []
    for frame in frames:
        file = BytesIO()
        Image.fromarray(frame).save(file, kind)
        files.append(file.getvalue())
    return files


@pytest.fixture(scope="module")
def encoder(picture_checkpoint: Callable[[str], Path]) -> Iterator[ImageEncoder]:
    folder = picture_checkpoint("qwen3-vl")
    family = find_family(folder)
    assert family is not None
    encoder = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", max_images=2, max_videos=2)
    yield encoder
    encoder.shutdown()


def test_a_video_is_the_same_however_it_is_given(encoder: ImageEncoder) -> None:
    clip = LONG[:4]  # an animation is sampled, and four frames are the fewest
    given: list[Any] = [
        (clip, {"fps": 8}), (list(clip), {"fps": 8.0}), ([Image.fromarray(frame) for frame in clip], {"fps": 8}),
        (files_of("PNG", clip), {"fps": 8}), saved("PNG", clip, 125), saved("WEBP", clip, 125, lossless=True),
    ]  # fmt: skip
    videos = [video for one in given for video in read_videos(one)]
    encoder.take_stats()
    found = [encoder.encode(video) for video in videos]
    assert all(one.token_ids == found[0].token_ids for one in found)
    assert all([part.tensor for part in one.parts] == [part.tensor for part in found[0].parts] for one in found)
    assert len(found[0].parts) == 2, "one for two frames"
    stats = encoder.take_stats()
    assert stats is not None
    assert (stats.num_cached, len(stats.encode_seconds)) == (2, 4), "equal pixels are encoded once"
    other = encoder.encode(Video(clip, 4.0))
    assert {part.digest for part in other.parts}.isdisjoint(part.digest for part in found[0].parts), "at another time"


def decode(folder: Path, files: list[bytes], fps: float | None = None) -> tuple[list[Frames], list[float], float]:
    family = find_family(folder)
    assert family is not None
    videos = load_video_processor(family, folder)
    assert videos is not None
    job = Job(1.0, -1, sum(map(len, files)), None, list(map(len, files)), fps)
    frames, seconds, found = decode_video(b"".join(files), job, family, videos.settings)
    return [np.asarray(frame) for frame in frames], seconds, found


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})])
@pytest.mark.parametrize(
    ("name", "duration", "chosen"),
    [
        ("qwen2-5-vl", 40, [0, 6, 12, 18]), ("qwen3-vl", 40, [0, 8, 16, 24]), ("qwen3-vl", 500, list(range(25))),
        ("qwen3-vl", 0, [0, 6, 12, 18, 24]), ("qwen2-5-vl", 150, [0, 4, 8, 12, 16, 20]),
    ],
)  # fmt: skip
def test_frames_of_an_animation(
    name: str, duration: int, chosen: list[int], kind: str, options: dict[str, Any], folder: Path
) -> None:
    """Two of each second, and no fewer than four, by the rule of each model."""
    colors = np.arange(0, 250, 10, dtype=np.uint8)  # a grey of each frame, which a GIF's palette has
    frames = np.broadcast_to(colors[:, None, None, None], (25, 8, 10, 3)).copy()
    found, seconds, fps = decode(folder, [saved(kind, frames, duration, **options)])
    shown = duration / 1000 or 0.1
    assert [int(frame[0, 0, 0]) for frame in found] == colors[chosen].tolist()
    assert seconds == pytest.approx([number * shown for number in chosen])
    assert fps == pytest.approx(len(chosen) / (25 * shown))
    still, seconds, fps = decode(folder, [saved(kind, frames[:1], 100)])
    assert (len(still), seconds, fps) == (1, [0.0], 2.0)


@pytest.mark.parametrize(
    ("name", "fps", "chosen"),
    [
        ("smolvlm", 1.0, list(range(20))), ("smolvlm", 4.0, [0, 4, 9, 14, 19]), ("smolvlm", 30.0, [0]),
        ("internvl", 5.0, [1, 3, 6, 8, 11, 13, 16, 18]), ("internvl", 100.0, [10]),
        ("llava_onevision", 10.0, [0, 5, 10, 15]), ("llava_onevision", 100.0, [0]),
    ],
)  # fmt: skip
def test_frames_of_an_animation_by_the_other_rules(name: str, fps: float, chosen: list[int], folder: Path) -> None:
    family = find_family(folder)
    assert family is not None
    assert list(family.choose_frames(family.read_video_settings({}), 20, fps)) == chosen


def test_smolvlm_samples_as_its_settings_say(picture_checkpoint: Callable[[str], Path]) -> None:
    """Of long videos, without the first and the last second."""
    family = find_family(picture_checkpoint("smolvlm"))
    assert family is not None
    sampling = {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 512}}
    settings = family.read_video_settings({"size": {"longest_edge": 2048}, "video_sampling": sampling})
    assert settings["size"] == {"longest_edge": 512}
    assert list(family.choose_frames(settings, 100, 10.0)) == [10, 36, 63, 90]
    assert list(family.choose_frames(settings, 50, 10.0)) == [0, 16, 32, 49]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (7, "seven"), (19, "nineteen"), (20, "twenty"), (64, "sixty-four"), (100, "one hundred"),
     (105, "one hundred and five"), (768, "seven hundred and sixty-eight")],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    assert in_words(number) == words


def theirs(module: str, name: str) -> Any:
    """Of a video processor of transformers', which needs torchvision to be called, but not for its arithmetic."""
    parts = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    mocks = {part: Mock() for part in [*parts, "torchvision.transforms.v2.functional"]}
    with patch.dict(sys.modules, mocks):
        return getattr(import_module(f"transformers.models.{module}.video_processing_{module}"), name)


@pytest.mark.parametrize(("name", "module"), [("qwen2-5-vl", "qwen2_vl"), ("qwen3-vl", "qwen3_vl")])
def test_frames_are_chosen_resized_and_cut_as_by_transformers(name: str, module: str, folder: Path) -> None:
    family = find_family(folder)
    assert family is not None
    videos = load_video_processor(family, folder)
    assert videos is not None
    processor = videos.processor
    kind, smart_resize = (
        theirs(module, one) for one in (f"{module.split('_')[0].title()}VLVideoProcessor", "smart_resize")
    )
    settings = SimpleNamespace(fps=2, num_frames=None, min_frames=4, max_frames=768, temporal_patch_size=2)
    rng = np.random.default_rng(0)
    for number, fps in [(5, 1.0), (4, 30.0), (900, 30.0), (3000, 2.0), (77, 7.5)]:
        metadata = SimpleNamespace(total_num_frames=number, fps=fps)
        arguments = {"fps": 2} | ({"min_frames": 4, "max_frames": 768} if module == "qwen2_vl" else {})
        expected = kind.sample_frames(settings, metadata, **arguments)
        assert list(family.choose_frames(videos.settings, number, fps)) == expected.tolist()
    for _ in range(20):
        number, width, height = rng.integers((2, 8, 8), (9, 200, 200)).tolist()
        limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        if module == "qwen3_vl":
            limits["num_frames"] = number
        rows, columns = smart_resize(height=height, width=width, factor=14, **limits)
        frames = video_of(number, width, height)
        arrays = video_arrays(folder, frames)
        images = [Image.fromarray(frame).resize((columns, rows), Image.Resampling.BICUBIC) for frame in frames]
        resized = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
        mean, std = (torch.tensor(one)[:, None, None] for one in (processor.image_mean, processor.image_std))
        patches, *grid = kind.patchify(None, ((resized / 255 - mean) / std)[None], 7, 2, 2)
        assert arrays["image_grid_thw"].tolist() == [grid]
        np.testing.assert_allclose(arrays["pixel_values"], patches[0].numpy(), atol=1e-5)


def test_positions_go_on_after_the_longest_side() -> None:
    """M-RoPE (https://arxiv.org/abs/2409.12191, section 2.1): what comes after a video begins after its largest
    position, which may be that of its last frame."""
    batch = InputBatch(1, 64, 16, 100, columns=[GRID_POSITIONS])
    (column,) = batch.columns
    for interval, times in ((1.0, [0, 1, 2, 3]), (2.5, [0, 2, 5, 7]), (0.4, [0, 0, 0, 1]), (0.0, [0] * 4)):
        part = PromptPart(2, 24, b"", b"", (4, 2, 3), frame_interval=interval)
        batch.add(NewRequestData(
            request_id="0", token_ids=[0] * 30, num_prompt_tokens=30, sampling_params=SamplingParams(),
            stop_token_ids=[], block_ids=[], num_computed_tokens=0, prompt_parts=[part],
        ))  # fmt: skip
        places = np.stack(np.meshgrid(times, [0, 1], [0, 1, 2], indexing="ij")).reshape(3, -1) + 2
        after = np.arange(max(times[-1], 2) + 3, max(times[-1], 2) + 9)
        whole = np.concatenate([np.tile([0, 1], (3, 1)), places, np.tile(after, (3, 1))], 1)
        for start, end in ((0, 32), (7, 19), (25, 27), (31, 32)):
            rows = StepRows(**batch.lay_out(np.array([batch.slots["0"]]), np.array([start]), np.array([end])))
            np.testing.assert_array_equal(column.values(rows), whole[:, start:end])
        batch.remove("0")


MP4 = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(2000)
WRONG: dict[str, tuple[Any, str]] = {
    "MP4": ([MP4], "a video cannot be used: it is no animation in GIF, WebP or PNG; containers such as MP4"),
    "MP4 as a frame": ([*files_of("PNG", SHORT), MP4], f"of its frame 3, it is no image in .*{FORMATS[-1]}"),
    "WebM": ([b"\x1aE\xdf\xa3" + bytes(99)], "containers such as MP4 are not decoded: send frames"),
    "nothing": ([b""], "it is no animation"),
    "a truncated GIF": ([saved("GIF", LONG, 100)[:-3000]], "a video cannot be used: ."),
    "a truncated APNG": ([saved("PNG", LONG, 100)[:-9000]], "a video cannot be used: ."),
    "a truncated WebP": ([saved("WEBP", LONG, 100)[:-900]], "a video cannot be used: ."),
    "an animation as a frame": ([saved("GIF", LONG, 100)] * 2, "of its frame 1, it is animated"),
    "TIFF pages": ([saved("TIFF", LONG, 100)], "several pages in the format TIFF"),
    "two sizes": (files_of("PNG", LONG)[:1] + files_of("PNG", SHORT), r"its frame 2 has the size \(30, 30\)"),
    "two sizes of arrays": ([LONG[0], SHORT[0]], r"its frame 2 has the size \(30, 30\), and the first \(60, 40\)"),
    "arrays and files": ([LONG[0], files_of("PNG", LONG)[0]], "its frame 2 has the size None"),
    "floats": ([LONG[0].astype(np.float32)], "a frame of a video cannot be used: it is an array .* of float32"),
    "a path": (["/etc/passwd"], "a frame of a video cannot be used: it is str"),
    "many frames": ([SHORT[0]] * 769, "has 769 frames; at most 768 are taken"),
    "many pixels": (
        [np.broadcast_to(LONG[0, :1, :1], (4000, 4000, 3))] * 7,
        f"7 frames of 4000 by 4000 pixels; at most {MAX_VIDEO_PIXELS}",
    ),
    "many pixels in small files": (
        files_of("PNG", np.zeros((1, 4000, 4000, 3), np.uint8)) * 7, "7 frames of 4000 by 4000 pixels"),
    "a thin frame": ([np.zeros((1, 300, 3), np.uint8)], "a side may be 200 times the other"),
    "large files": ([bytes(20 << 20)] * 2, "its files have more than 32 MiB together"),
}  # fmt: skip
"""Name → frames, and what the error says."""


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_video_is_named(name: str, encoder: ImageEncoder) -> None:
    frames, message = WRONG[name]
    with pytest.raises(RequestError, match=message):
        encoder.encode(Video(frames))
    assert encoder.encode(Video(SHORT, 2.0)).parts, "others go on"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "a video is 5; it must be a file, an array of 4 dimensions, or a list of frames"),
        ([], r"a video is \[\]"),
        ("a.mp4", "a video is 'a.mp4'"),
        (LONG[0], "a video is "),
        ([[[LONG]]], "a video is "),
        (([LONG, SHORT], {"fps": 2}), "a video is "),
        ((LONG, {"fps": 0}), "it must be {'fps': number above 0} alone"),
        ((LONG, {"fps": True}), "it must be {'fps': number above 0} alone"),
        ((LONG, {"frames_indices": [0, 5]}), "it must be {'fps': number above 0} alone"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_videos_is_named(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_videos(given)
    assert error.value.parameter == "multi_modal_data"


def test_videos_have_placeholders_and_limits_of_their_own(encoder: ImageEncoder) -> None:
    image, video = encoder._family.placeholder_id, encoder._family.video_token_id
    assert video is not None
    clip, other = Video(SHORT, 2.0), Video(STILL, 2.0)
    token_ids, parts = encoder.insert([5, video, 6, image, 7, video], [clip, other, IMAGE])
    lone = [encoder.encode(one).token_ids for one in (clip, IMAGE, other)]
    assert token_ids[:1] + token_ids[-len(lone[2]) :] == [5, *lone[2]]
    assert sum(part.length for part in parts) == sum(
        part.length for one in (clip, IMAGE, other) for part in encoder.encode(one).parts
    )
    with pytest.raises(RequestError, match="3 videos; limit_mm_per_prompt allows 2"):
        encoder.insert([video] * 3, [clip] * 3)
    with pytest.raises(RequestError, match=r"has 1 videos for 2 times <.video_pad.> in the prompt"):
        encoder.insert([video] * 2, [clip])
    with pytest.raises(RequestError, match=r"has 0 images for 1 times <.image_pad.>"):
        encoder.insert([video, image], [clip])
    with pytest.raises(RequestError, match="multi_modal_data: video 2 cannot be used"):
        encoder.insert([image, video], [IMAGE, Video([MP4])])


@pytest.mark.parametrize("name", ["idefics3", "gemma3"])
def test_a_model_without_videos_says_so(name: str, folder: Path) -> None:
    family = find_family(folder)
    assert family is not None
    encoder = ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", max_images=1)
    try:
        with pytest.raises(RequestError, match="a video, which this model does not take; give frames of it as images"):
            encoder.insert([family.placeholder_id], [Video(SHORT)])
    finally:
        encoder.shutdown()


@pytest.mark.parametrize("name", ["qwen2-5-vl"])
def test_chats_with_videos(name: str, folder: Path) -> None:
    """Frames far apart would have positions beyond those of the prompt, which is rejected."""
    template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'video' %}"
        f"{ONE_VIDEO}{{% elif part.type == 'image' %}}{ONE_IMAGE}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
        "{% endfor %}{% endfor %}"
    )
    text = {"type": "text", "text": "a"}
    with llm_of_thread_ranks(folder, **SETTINGS) as llm:
        llm._inputs.tokenizer.chat_template = template
        url = Video(files_of("PNG", LONG), 12.0).text
        parts: list[dict[str, Any]] = [
            {"type": "video_url", "video_url": {"url": url}}, {"type": "video", "video": (LONG, {"fps": 12})},
        ]  # fmt: skip
        outputs = [llm.chat([{"role": "user", "content": [part, text]}], GREEDY, use_tqdm=False)[0] for part in parts]
        (plain,) = llm.generate([prompt_of(f"{ONE_VIDEO}a", [], [(LONG, 12.0)])], GREEDY, use_tqdm=False)
        assert [output.outputs for output in outputs] == [plain.outputs] * 2
        with pytest.raises(RequestError, match="state a higher fps"):
            llm.generate([prompt_of(ONE_VIDEO, [], [(LONG, 0.01)])], GREEDY, use_tqdm=False)
