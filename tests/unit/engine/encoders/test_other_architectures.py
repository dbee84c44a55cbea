"""Architectures whose images transformers' own code computes: in the engine, and which are rejected and why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from quire_engine import EngineConfig, SamplingParams
from quire_engine.encoders import image_encoder, tower_process
from quire_engine.encoders.families.base import NoImagesError
from quire_engine.encoders.families.other import Other
from quire_engine.encoders.family import find_family
from quire_engine.encoders.image_encoder import ImageEncoder, make_image_encoder
from quire_engine.encoders.towers.loading import load_tower
from quire_engine.encoders.towers.transformers_tower import TransformersTower
from quire_engine.errors import CheckpointError, RequestError
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import EngineCoreReady
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.fallback.wrapper import check_text
from support.checkpoints import edit_json
from support.oracle import load_reference
from support.pictures import expand, image_of
from support.ranks import llm_of_thread_ranks
from transformers import CONFIG_MAPPING

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 2**22, "block_size": 4,
    "limit_mm_per_prompt": {"image": 0},
}  # fmt: skip
"""Without a tower of their own: all engines of a test share one."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def encoder_of(folder: Path) -> ImageEncoder:
    family = find_family(folder)
    assert family is not None
    return ImageEncoder(folder, family, load_tokenizer(folder), "float32", "cpu", max_images=4)


@pytest.mark.parametrize("name", ["deepseek_vl", "gemma4-e", "llava_onevision"])
def test_in_chunks_from_the_cache_after_preemption_and_of_several_ranks(
    name: str, picture_checkpoint: Callable[[str], Path]
) -> None:
    """The same tokens, however the engine computes them."""
    folder = picture_checkpoint(name)
    encoder = encoder_of(folder)
    place = encoder.placeholders["image"]
    first, second = image_of(40, 90), image_of(130, 61, seed=1)
    prompts: list[Any] = [
        {"prompt": f"def f({place}):", "multi_modal_data": {"image": [first]}},
        {"prompt": f"{place} and {place}\n", "multi_modal_data": {"image": [second, first]}},
        "no picture",
    ]

    params = GREEDY

    def generate(num_times: int = 1, **settings: Any) -> tuple[list[list[int]], int, int]:
        with llm_of_thread_ranks(folder, **{**SETTINGS, **settings}) as llm:
            llm._inputs.images = encoder
            try:
                for _ in range(num_times):
                    outputs = llm.generate(prompts, params, use_tqdm=False)
            finally:
                llm._inputs.images = None
            stats = llm.get_stats()
            assert stats.num_failed_steps == 0
            assert num_times == 1 or all(output.num_cached_tokens for output in outputs)
            num_blocks = stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free
            return [output.outputs[0].token_ids for output in outputs], num_blocks, stats.num_preemptions

    try:
        expected, num_blocks, _ = generate()
        assert generate(2, max_num_batched_tokens=7, max_num_seqs=3)[0] == expected
        ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1 if name == "llava_onevision" else 2}
        if name == "gemma4-e":  # its layers that share a cache are on one stage
            ranks = {"tensor_parallel_size": 2}
        assert generate(**ranks, max_num_batched_tokens=32)[0] == expected
        if name == "gemma4-e":  # whose layers with a window need fewer blocks
            return
        num_own = len(encoder.insert(load_tokenizer(folder).encode(prompts[1]["prompt"]), [second, first])[0]) // 4 + 1
        prompts, params = [prompts[1]] * 3, replace(GREEDY, max_tokens=60)
        whole = generate()[0]
        scarce = SETTINGS["kv_cache_memory_bytes"] // num_blocks * (max(2 * num_own, num_own + 11) + 6)
        found, _, num_preemptions = generate(kv_cache_memory_bytes=scarce, enable_prefix_caching=False)
        assert found == whole
        assert num_preemptions > 0
    finally:
        encoder.shutdown()


@pytest.mark.parametrize(("model_type", "message"), [
    ("deepseek_vl", None),
    ("lighton_ocr", None),
    ("ovis2", None),
    ("gemma3", "Gemma3ForConditionalGeneration gives its text model attention_mask of its own"),
    ("glm4v", "Glm4vForConditionalGeneration has positions of several dimensions"),
    ("llama4", "Llama4ForConditionalGeneration has no text model and head of the usual names"),
])  # fmt: skip
def test_text_is_tried_before_a_model_is_loaded(model_type: str, message: str | None, tmp_path: Path) -> None:
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    if message is None:
        check_text(tmp_path)
        return
    with pytest.raises(CheckpointError, match=message):
        check_text(tmp_path)


def test_a_text_model_that_scales_is_rejected_where_its_architecture_is_not_listed(tmp_path: Path) -> None:
    architecture = "DeepseekVLForConditionalGeneration"
    config = CONFIG_MAPPING["deepseek_vl"](architectures=[architecture], text_config=CONFIG_MAPPING["gemma2"]())
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{architecture} has a text model that scales .* \\(gemma2\\)"):
        CheckpointConfig.from_folder(tmp_path)


@pytest.mark.parametrize(("model_type", "architecture", "message"), [
    ("cohere2_vision", "Cohere2VisionForConditionalGeneration", "no image processor for it that needs Pillow alone"),
    ("idefics2", "Idefics2ForConditionalGeneration", "does not say by itself which tokens an image becomes"),
    ("gemma3n", "Gemma3nForConditionalGeneration", "its tower is code of the package timm, which needs torchvision"),
    ("nothing", "NothingForConditionalGeneration", "no image processor for it"),
    ("aya_vision", "AyaVisionForConditionalGeneration", "its tokenizer has no <image>"),
])  # fmt: skip
def test_who_takes_no_images_says_why(model_type: str, architecture: str, message: str, tmp_path: Path) -> None:
    vision = {"hidden_size": 8} | ({"model_type": "gemma3n_vision"} if model_type == "gemma3n" else {})
    config = {"architectures": [architecture], "model_type": model_type, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_family(tmp_path) is None, "there is no image processor"
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(NoImagesError, match=f"{architecture} takes no images here: .*{message}"):
        find_family(tmp_path)


def test_requests_with_images_are_rejected_with_the_reason(
    picture_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "Cohere2VisionForConditionalGeneration takes no images here: its processor is missing"

    def find(config: EngineConfig) -> None:
        raise NoImagesError(reason)

    monkeypatch.setattr(image_encoder, "image_family", find)
    folder = picture_checkpoint("deepseek_vl")
    why = make_image_encoder(EngineConfig.from_settings({"model": str(folder)}), None)
    assert why == reason
    inputs = InputProcessor(load_tokenizer(folder), EngineCoreReady(vocab_size=4160, max_model_len=64), images=why)
    prompt = {"prompt": "a", "multi_modal_data": {"image": image_of(28, 28)}}
    with pytest.raises(RequestError, match=f"multi_modal_data holds images; {reason}"):
        inputs.process(prompt, GREEDY)


def test_a_tower_that_never_encodes_is_the_models_fault_and_no_busy_servers(
    picture_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(picture_checkpoint("deepseek_vl"))
    try:
        answer = msgspec.json.encode(tower_process.Encoded(error="it takes no images here", is_final=True))
        monkeypatch.setattr(encoder, "_ask", lambda *_: (answer, 0.0))
        with pytest.raises(RequestError, match="multi_modal_data holds images; it takes no images here"):
            encoder._ask_tower(tower_process.Job())
    finally:
        encoder.shutdown()


@torch.inference_mode()
def test_rows_of_several_tokens(picture_checkpoint: Callable[[str], Path]) -> None:
    """Ovis 2 has further tokens with rows of their own, which a field names; or else it would take no images."""
    folder, image = picture_checkpoint("ovis2"), image_of(40, 90)
    family = find_family(folder)
    assert isinstance(family, Other)
    assert len(family.other_state_ids) == 5
    arrays = {name: torch.from_numpy(value) for name, value in family.prepare([image]).items()}
    assert family.expand(family.layout(arrays), "") == load_tokenizer(folder).encode(expand("ovis2", folder, image))
    found = load_tower(folder, family, torch.float32, torch.device("cpu"))(**arrays)
    model, rows = load_reference(folder), []
    model.model.language_model.register_forward_pre_hook(
        lambda _, positional, named: rows.append(named["inputs_embeds"][0]), with_kwargs=True
    )
    model(**arrays)
    assert torch.allclose(found, rows[0], atol=1e-5)
    assert len(found) == arrays["input_ids"].shape[1]
    with pytest.raises(NoImagesError, match=r"Ovis2ForConditionalGeneration .* it gives its text model other rows"):
        TransformersTower(folder, [family.image_token_id], family.prepare).pack()


def test_in_bfloat16(picture_checkpoint: Callable[[str], Path]) -> None:
    folder = picture_checkpoint("deepseek_vl")
    family = find_family(folder)
    assert isinstance(family, Other)
    arrays = family.prepare([image_of(40, 90)])
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        tower = load_tower(folder, family, dtype, torch.device("cpu"))
        with torch.inference_mode():
            states.append(tower(**{name: torch.from_numpy(value) for name, value in arrays.items()}))
        assert states[-1].dtype == dtype
    assert torch.nn.functional.cosine_similarity(states[0], states[1].float()).min() > 0.995


def test_code_of_a_checkpoint_is_never_run(picture_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Wherever its files name some."""
    for path in picture_checkpoint("deepseek_vl").iterdir():
        (tmp_path / path.name).symlink_to(path)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    autos = ("AutoConfig", "AutoImageProcessor", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor")
    named = {**dict.fromkeys(autos, "own.Own"), "AutoTokenizer": ["own.Own", "own.Own"]}
    for name in ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        edit_json(tmp_path / name, auto_map=named)
    family = find_family(tmp_path)
    assert isinstance(family, Other)
    arrays = family.prepare([image_of(40, 90)])
    check_text(tmp_path)
    tower = load_tower(tmp_path, family, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        states = tower(**{name: torch.from_numpy(value) for name, value in arrays.items()})
    assert states.shape == (16, 64)
    assert not ran.exists()
