"""DFlash drafts blocks as the published code does, written here in plain torch, and changes no token."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire_engine.errors import CheckpointError
from quire_engine.models import check_checkpoint
from quire_engine.models.layers.rope import rope_cos_sin
from quire_engine.models.options import RopeConfig
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.draft_engines import SMALL_STEPS, check_no_token_changes, drafting_llm, drafts_of
from support.oracle import load_reference, make_prompts

VOCAB_SIZE, HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, EPS = 515, 4, 2, 24, 16, 1e-6
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
PARAMS = [
    {"temperature": 0}, {"seed": 1}, {"seed": 2, "top_p": 0.9, "top_k": 20}, {"seed": 3, "repetition_penalty": 1.1},
    {"temperature": 0, "logprobs": 2},
]  # fmt: skip


def make_draft(folder: Path, target: Path, **changes: Any) -> Path:
    """A random one of two layers, with `config.json` and tensors as they are published."""
    fields = json.loads((target / "config.json").read_text())
    size, num_layers = fields["hidden_size"], fields["num_hidden_layers"]
    taps = [0, num_layers - 1, 1]
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": size, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE,
        "rms_norm_eps": EPS, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "block_size": 6,
        "num_target_layers": num_layers, "dtype": "float32", "rope_theta": 1000.0,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": taps}, **changes,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc": (size, 3 * size)}
    for prefix in ("layers.0.", "layers.1."):
        shapes |= {
            f"{prefix}self_attn.q_proj": (HEADS * HEAD_SIZE, size),
            f"{prefix}self_attn.k_proj": (KV_HEADS * HEAD_SIZE, size),
            f"{prefix}self_attn.v_proj": (KV_HEADS * HEAD_SIZE, size),
            f"{prefix}self_attn.o_proj": (size, HEADS * HEAD_SIZE),
            f"{prefix}mlp.gate_proj": (40, size),
            f"{prefix}mlp.up_proj": (40, size),
            f"{prefix}mlp.down_proj": (size, 40),
        }
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}
    norms = {"norm": size, "hidden_norm": size}
    for prefix in ("layers.0.", "layers.1."):
        norms |= {f"{prefix}{name}": size for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{prefix}self_attn.{name}": HEAD_SIZE for name in ("q_norm", "k_norm")}
    tensors |= {f"{name}.weight": torch.rand(number, generator=generator) + 0.5 for name, number in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


class Reference:
    """Target in transformers, and what drafts in plain torch, over a whole sequence at once."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target, self.tensors = load_reference(target), load_file(draft / "model.safetensors")
        self.config = json.loads((draft / "config.json").read_text())
        self.inner = self.config["dflash_config"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, EPS)

    def heads(self, x: torch.Tensor, name: str, norm: str | None, first: int) -> torch.Tensor:
        """[H, T, D], at positions from `first` on."""
        out = self.linear(x, name).unflatten(-1, (-1, HEAD_SIZE))
        if norm is None:
            return out.transpose(0, 1)
        x1, x2 = self.norm(out, norm).transpose(0, 1).chunk(2, dim=-1)
        angles = rope_cos_sin(RopeConfig(rope_theta=1000.0), HEAD_SIZE, first + len(x))[first:]
        cos, sin = angles.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def attention(self, layer: int, hidden: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        prefix, first = f"layers.{layer}.self_attn.", len(feature)
        query = self.heads(hidden, f"{prefix}q_proj", f"{prefix}q_norm", first)
        both = torch.cat((feature, hidden))
        key = self.heads(both, f"{prefix}k_proj", f"{prefix}k_norm", 0)
        value = self.heads(both, f"{prefix}v_proj", None, 0)
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (key, value))
        has_window = "layer_types" in self.config and self.config["layer_types"][layer] == "sliding_attention"
        is_causal = self.config.get("is_causal", self.inner.get("causal", has_window))
        distance = torch.arange(first, len(both))[:, None] - torch.arange(len(both))
        visible = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        if has_window:
            visible = visible & (distance.abs() < self.config["sliding_window"])
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.linear(out.transpose(0, 1).flatten(1), f"{prefix}o_proj")

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """So many drafts after these tokens, greedily; the last of them is not computed by the target yet."""
        states: Any = self.target(torch.tensor([token_ids[:-1]]), output_hidden_states=True, use_cache=False)
        tapped = [states.hidden_states[number + 1][0] for number in self.inner["target_layer_ids"]]
        feature = self.norm(self.linear(torch.cat(tapped, -1), "fc"), "hidden_norm")
        block = torch.tensor([token_ids[-1], *[self.inner["mask_token_id"]] * number])
        hidden = F.embedding(block, self.target.get_input_embeddings().weight)
        hidden = hidden * self.inner.get("input_embedding_scale", 1.0)
        for layer in range(2):
            normed = self.norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = hidden + self.attention(layer, normed, feature)
            x = self.norm(hidden, f"layers.{layer}.post_attention_layernorm")
            x = F.silu(self.linear(x, f"layers.{layer}.mlp.gate_proj")) * self.linear(x, f"layers.{layer}.mlp.up_proj")
            hidden = hidden + self.linear(x, f"layers.{layer}.mlp.down_proj")
        logits: torch.Tensor = self.target.get_output_embeddings()(self.norm(hidden[1:], "norm"))
        return logits.argmax(-1).tolist()  # which a scale and a cap do not change


llm_of = partial(drafting_llm, "dflash", vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("name", "most", "changes", "settings"), [
    ("qwen3", 3, {}, {}), ("qwen3", 9, WINDOW, SMALL_STEPS), ("qwen3", 5, {**WINDOW, "is_causal": False}, {}),
    ("qwen3-5", 3, {}, {}),
    ("gemma4", 4, {"dflash_config": {
        "mask_token_id": 7, "target_layer_ids": [0, 4, 1], "causal": True, "input_embedding_scale": 2.0,
        "final_logit_softcapping": 9.0, "output_multiplier": 0.4, "block_size": 6,
    }, "block_size": None}, {}),
    ("qwen3", 3, {}, {"tensor_parallel_size": 2}), ("gemma4", 3, {}, {"tensor_parallel_size": 2}),
])  # fmt: skip
def test_drafts_are_those_of_the_published_code(
    name: str,
    most: int,
    changes: dict[str, Any],
    settings: dict[str, Any],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Long prompts and short ones, in blocks of six tokens at most; the second time they are found in the prefix cache,
    if there is one."""
    target, draft = checkpoint(name), make_draft(tmp_path / "draft", checkpoint(name), **changes)
    reference, prompts = Reference(target, draft), make_prompts(4, VOCAB_SIZE, max_length=60)
    with llm_of(target, draft, most=most, **settings) as llm:
        for _ in range(2):
            for known, own in drafts_of(llm, prompts):
                number = len(own.token_ids)
                assert 0 < number <= min(most, 5)
                if (own.start - 1 + number) % BLOCK_SIZE == 0 and number > 1:  # the last mask may have no place
                    shorter = reference.drafts(known, number - 1)
                    assert own.token_ids in (reference.drafts(known, number), [*shorter, shorter[-1]])
                elif (own.start - 1 + number) % BLOCK_SIZE:
                    assert own.token_ids == reference.drafts(known, number)


def make_predictable(target: Path, draft: Path, folder: Path) -> None:
    """Copies of both, in `target` and `draft` of the folder, that say the same token most of the time."""
    for source, name in ((target, "target"), (draft, "draft")):
        shutil.copytree(source, folder / name)
        tensors = load_file(source / "model.safetensors")
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor *= 0.01
        if name == "target":
            tensors["model.embed_tokens.weight"][:, 0] = 3.0
            tensors["lm_head.weight"] *= 0.3
            tensors["lm_head.weight"][:, 0] = 0.0
            tensors["lm_head.weight"][9, 0] = 2.0
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def predictable(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash")
    make_predictable(checkpoint("qwen3"), make_draft(folder / "random", checkpoint("qwen3")), folder)
    return folder


@pytest.mark.parametrize("settings", [
    {}, {**SMALL_STEPS, "acceptance": "rejection"}, {"async_scheduling": True}, {"quantization": "int8"},
    {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_memory_bytes": 7 * 2**15},
    {"tensor_parallel_size": 2, "quantization": "int8"},
])  # fmt: skip
def test_no_token_changes(settings: dict[str, Any], predictable: Path) -> None:
    prompts = make_prompts(len(PARAMS), VOCAB_SIZE, max_length=40)
    stats = check_no_token_changes(llm_of, predictable / "target", predictable / "draft", prompts, PARAMS, settings)
    assert stats.num_preemptions >= ("kv_cache_memory_bytes" in settings)


@pytest.mark.parametrize(("changes", "told"), [
    ({"architectures": ["DFlash2DraftModel"]}, "unknown architecture 'DFlash2DraftModel'; known are DFlashDraftModel"),
    ({"hidden_size": 96}, "hidden_size is 96; it must be 64, as in the model"),
    ({"vocab_size": 500}, "vocab_size is 500; it must be 515, as in the model"),
    ({"num_target_layers": 4}, "num_target_layers is 4; it must be 3, as in the model"),
    ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "mask_token_id is missing"),
    ({"dflash_config": {"mask_token_id": 515, "target_layer_ids": [0]}}, "mask_token_id is 515; it must be an integer"),
    ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [3]}}, "target_layer_ids is [3]; it must be a list"),
    ({"dflash_config": {"mask_token_id": 5}}, "target_layer_ids is None; it must be a list of integers from 0 to 2"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is "),
    ({"num_hidden_layers": 9999}, "files hold no layers."),
])  # fmt: skip
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], told: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target = checkpoint("qwen3")
    draft = make_draft(tmp_path / "draft", target)
    check_checkpoint(target, drafts=("dflash", str(draft)))
    edit_json(draft / "config.json", **changes)
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(target, drafts=("dflash", str(draft)))
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_it_drafts_by_its_own_method(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    target = checkpoint("qwen3")
    draft = make_draft(tmp_path / "draft", target)
    with pytest.raises(CheckpointError, match="that is no draft model; set method to 'dflash'"):
        check_checkpoint(target, drafts=("draft_model", str(draft)))
