"""Gemma 4's assistant drafts what transformers' own says, from the target's cache, and changes no token."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quire_engine import SamplingParams
from quire_engine.config import EngineConfig
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.gemma4_assistant import load_assistant
from quire_engine.models.loader import load_model
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.draft_engines import SMALL_STEPS, check_no_token_changes, drafting_llm, drafts_of
from support.oracle import CHECKPOINTS, load_reference, make_prompts

VOCAB_SIZE, SIZE = 515, 32
TARGETS = ["gemma4", "gemma4-conditional", "gemma4-unified"]
"""Keys that are values, layers that share a cache and have inputs of their own, and another architecture."""
PARAMS = [
    {"temperature": 0}, {"seed": 1, "temperature": 0.3}, {"seed": 2, "top_p": 0.9, "top_k": 20, "temperature": 0.5},
    {"seed": 3, "repetition_penalty": 1.1, "temperature": 0.2}, {"temperature": 0, "logprobs": 2},
]  # fmt: skip


def make_assistant(folder: Path, target: Path, *, is_ordered: bool, has_own_head: bool = False) -> None:
    """A random one of three layers for one of the oracle's checkpoints."""
    settings = CHECKPOINTS[target.name]
    text = {**settings, **settings.get("text_config", {})}
    kept = (
        "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v",
        "sliding_window", "rope_parameters",
    )  # fmt: skip
    name = "Gemma4Unified" if "unified" in target.name else "Gemma4"
    sizes = {
        "hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "initializer_range": 0.2,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }  # fmt: skip
    own = {name: text[name] for name in kept if name in text}
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}AssistantConfig")(
        text_config=getattr(transformers, f"{name}TextConfig")(**sizes, **own),
        backbone_hidden_size=text.get("hidden_size", 64), use_ordered_embeddings=is_ordered, num_centroids=5,
        centroid_intermediate_top_k=2, tie_word_embeddings=not has_own_head,
    )  # fmt: skip
    model = getattr(transformers, f"{name}AssistantForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif buffer_name.endswith("token_ordering"):
            buffer.copy_(torch.randperm(VOCAB_SIZE))
    model.save_pretrained(folder)


class Reference:
    """Target and assistant in transformers, float32."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target = load_reference(target)
        name = json.loads((assistant / "config.json").read_text())["architectures"][0]
        self.assistant = getattr(transformers, name).from_pretrained(assistant, dtype=torch.float32).eval()
        self.window = self.assistant.config.text_config.sliding_window

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """So many drafts after these tokens, greedily; the last of them is not computed by the target yet."""
        states: Any = self.target(
            torch.tensor([token_ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        shared, hidden = dict(states.shared_kv_states), states.hidden_states[-1][:, -1:]
        shared["sliding_attention"] = tuple(one[:, :, -self.window :] for one in shared["sliding_attention"])
        drafts, last = [], token_ids[-1]
        for _ in range(number):
            embedded = self.target.get_input_embeddings()(torch.tensor([[last]]))
            out = self.assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1), shared_kv_states=shared,
                position_ids=torch.tensor([[len(token_ids) - 1]]),
            )  # fmt: skip
            last, hidden = int(out.logits.argmax()), out.last_hidden_state
            drafts.append(last)
        return drafts


llm_of = partial(drafting_llm, "mtp", vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("name", "is_ordered", "has_own_head", "settings"), [
    ("gemma4", False, False, {}), ("gemma4", True, True, SMALL_STEPS), ("gemma4-conditional", True, False, {}),
    ("gemma4-conditional", False, True, {"disable_hybrid_kv_cache_manager": True}),
    ("gemma4-unified", False, False, SMALL_STEPS),
])  # fmt: skip
def test_drafts_are_those_of_transformers(
    name: str,
    is_ordered: bool,
    has_own_head: bool,
    settings: dict[str, Any],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Prompts shorter and longer than the window; the second time they are found in the prefix cache, if there is
    one."""
    target, assistant = checkpoint(name), tmp_path / "assistant"
    make_assistant(assistant, target, is_ordered=is_ordered, has_own_head=has_own_head)
    reference, prompts = Reference(target, assistant), make_prompts(4, VOCAB_SIZE, max_length=60)
    with llm_of(target, assistant, **settings) as llm:
        for _ in range(2):
            for known, own in drafts_of(llm, prompts):
                assert own.token_ids == reference.drafts(known, len(own.token_ids))


def make_predictable(target: Path, assistant: Path, folder: Path) -> None:
    """Copies of both, in `target` and `assistant` of the folder, that repeat the last token for the most part."""
    for source, name in ((target, "target"), (assistant, "assistant")):
        shutil.copytree(source, folder / name)
        tensors = load_file(source / "model.safetensors")
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor *= 0.01
        if name == "target":
            (table,) = (one for key, one in tensors.items() if key.endswith(".embed_tokens.weight"))
        else:
            size = table.shape[1]
            mixed = torch.randn(size, SIZE, generator=torch.Generator().manual_seed(4)) / size**0.5
            tensors["model.embed_tokens.weight"] = table @ mixed
            tensors["pre_projection.weight"] = torch.cat((mixed.T, torch.zeros(SIZE, size)), 1).contiguous()
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def predictable(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    make_assistant(folder / "random", checkpoint("gemma4"), is_ordered=False)
    make_predictable(checkpoint("gemma4"), folder / "random", folder)
    return folder


@pytest.mark.parametrize("settings", [
    {}, {**SMALL_STEPS, "acceptance": "rejection"}, {"async_scheduling": True}, {"quantization": "int8"},
    {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"},
])  # fmt: skip
def test_no_token_changes(settings: dict[str, Any], predictable: Path) -> None:
    prompts = make_prompts(len(PARAMS), VOCAB_SIZE, max_length=40)
    check_no_token_changes(llm_of, predictable / "target", predictable / "assistant", prompts, PARAMS, settings)


def test_prompts_without_token_ids_are_drafted_for(predictable: Path) -> None:
    """It reads keys and values of the prompt alone."""
    prompt = make_prompts(1, VOCAB_SIZE, max_length=40)[0]
    with torch.inference_mode():
        rows = load_reference(predictable / "target").get_input_embeddings()(torch.tensor(prompt))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with llm_of(predictable / "target", predictable / "assistant") as llm:
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
        num_drafts = llm.get_stats().drafts.num_draft_tokens
        (output,) = llm.generate([{"prompt_embeds": rows}], params, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.get_stats().drafts.num_draft_tokens > num_drafts > 0


@pytest.fixture
def pair(checkpoint: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A target and its assistant, which has clusters."""
    make_assistant(tmp_path / "assistant", checkpoint("gemma4"), is_ordered=True)
    return checkpoint("gemma4"), tmp_path / "assistant"


@pytest.mark.parametrize(("outer", "inner", "told"), [
    ({"backbone_hidden_size": 64}, {}, "backbone_hidden_size is 64; it must be 60, as in the model"),
    ({"num_centroids": 7}, {}, "num_centroids is 7; it must be a divisor of vocab_size=515"),
    ({"centroid_intermediate_top_k": 6}, {}, "centroid_intermediate_top_k is 6; it must be an integer from 1 to 5"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config is "),
    ({}, {"vocab_size": 510}, "vocab_size is 510; it must be 515, as in the model"),
    ({}, {"sliding_window": 16}, "layer 0 reads 2 heads of keys of size 20 of the target's last layer with a window of "
     "16, which has none; give the assistant"),
    ({}, {"head_dim": 24}, "layer 0 reads 2 heads of keys of size 24 of the target's last layer with a window of 17, "
     "which has 2 of size 20; give"),
    ({}, {"enable_moe_block": True}, "text_config.enable_moe_block is True; it must be false"),
    ({}, {"hidden_size_per_layer_input": 8}, "text_config.hidden_size_per_layer_input is 8; it must be"),
    ({}, {"num_hidden_layers": 9999, "layer_types": ["full_attention"] * 9999}, "files hold no layers."),
])  # fmt: skip
def test_what_does_not_fit_is_named(
    outer: dict[str, Any], inner: dict[str, Any], told: str, pair: tuple[Path, Path]
) -> None:
    target, assistant = pair
    text = json.loads((assistant / "config.json").read_text())["text_config"]
    if "num_hidden_layers" in inner:
        text.pop("per_layer_config", None)
        inner = {**inner, "global_head_dim": 36, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    edit_json(assistant / "config.json", **outer, text_config={**text, **inner})
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(target, drafts=("gemma4_assistant", str(assistant)))
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tensors_are_checked(pair: tuple[Path, Path]) -> None:
    target, assistant = pair
    check_checkpoint(target, drafts=("gemma4_assistant", str(assistant)))
    tensors = load_file(assistant / "model.safetensors")
    ordering = "masked_embedding.token_ordering"
    tensors[ordering][5] = VOCAB_SIZE
    save_file(tensors, assistant / "model.safetensors")
    config = CheckpointConfig.from_folder(target)
    model = load_model(target, config, torch.float32, 64)
    with pytest.raises(CheckpointError, match=f"tensor {ordering} has token 515; it must be from 0 to 514"):
        load_assistant(assistant, config, model, 64)
    del tensors[ordering]
    save_file(tensors, assistant / "model.safetensors")
    with pytest.raises(CheckpointError, match="hold no token_ordering"):
        check_checkpoint(target, drafts=("gemma4_assistant", str(assistant)))


def test_it_drafts_by_its_own_method_on_one_rank(pair: tuple[Path, Path]) -> None:
    target, assistant = pair
    with pytest.raises(CheckpointError, match="that is no draft model; set method to 'gemma4_assistant'"):
        check_checkpoint(target, drafts=("draft_model", str(assistant)))
    for name in ("mtp", "gemma4_mtp", "gemma4_assistant"):
        settings = {"model": "/m", "speculative_config": {"method": name, "model": "/d"}}
        assert EngineConfig.from_settings(settings).scheduler.draft_checkpoint == ("gemma4_assistant", "/d")
    for other in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(ValueError, match=f"method is 'gemma4_assistant' with .*{other}=2.*; it reads the"):
            EngineConfig.from_settings({**settings, other: 2})
