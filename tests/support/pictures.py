"""Small checkpoints of models that take images, with random weights; images; and what transformers makes of them."""

import json
from collections.abc import Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from quire_engine.encoders.family import as_arrays, find_family, load_processor
from support.oracle import load_reference
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["PICTURES", "expand", "generate", "image_of", "make_picture_checkpoint"]

TEXT = {
    "vocab_size": 4160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.2,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 7,
    "image_size": 28, "initializer_range": 0.2,
}  # fmt: skip
IDEFICS_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
IDEFICS_PIXELS = {"size": {"longest_edge": 4 * 28}, "max_image_size": {"longest_edge": 28}}
QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
QWEN_VISION = {
    "depth": 3, "num_heads": 2, "patch_size": 7, "hidden_size": 24, "intermediate_size": 36, "out_hidden_size": 64,
    "initializer_range": 0.2,
}  # fmt: skip
QWEN = {
    "tokens": QWEN_TOKENS, "image_token": "<|image_pad|>", "around": "<|vision_start|>{}<|vision_end|>",
    "ids": QWEN_IDS, "pixels": {"patch_size": 7, "min_pixels": 14 * 14, "max_pixels": 30 * 14 * 14},
}  # fmt: skip
QWEN2_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}}
QWEN3_TEXT = {
    **TEXT, "head_dim": 16, "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
}  # fmt: skip
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
QWEN_HYBRID = {
    **TEXT, "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
    },
}  # fmt: skip
PICTURES: dict[str, dict[str, Any]] = {
    "idefics3": {
        "config": {"model_type": "idefics3", "vision_config": SIGLIP, "scale_factor": 2, "text_config": {
            **TEXT, "model_type": "llama", "pad_token_id": 0,
        }},
        "tokens": IDEFICS_TOKENS, "image_token": "<image>", "pixels": IDEFICS_PIXELS,
        "processor": "idefics3.processing_idefics3.Idefics3Processor",
    },
    "qwen2-5-vl": {
        "config": {
            "model_type": "qwen2_5_vl", "text_config": {**QWEN2_TEXT, "model_type": "qwen2_5_vl_text"},
            "vision_config": {**QWEN_VISION, "window_size": 28, "fullatt_block_indexes": [1]},
        },
        **QWEN, "processor": "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    },
    "qwen2-vl": {
        "config": {
            "model_type": "qwen2_vl", "text_config": {**QWEN2_TEXT, "model_type": "qwen2_vl_text"},
            "vision_config": {**QWEN_VISION, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 64},
        },
        **QWEN, "processor": "qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    },
    "qwen3-5": {
        "config": {
            "model_type": "qwen3_5", "text_config": {**QWEN_HYBRID, "model_type": "qwen3_5_text"},
            "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
        },
        **QWEN, "processor": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    },
    "qwen3-5-moe": {
        "config": {
            "model_type": "qwen3_5_moe", "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
            "text_config": {
                **QWEN_HYBRID, **QWEN_EXPERTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 40,
            },
        },
        **QWEN, "processor": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    },
    "qwen3-vl": {
        "config": {
            "model_type": "qwen3_vl", "text_config": {**QWEN3_TEXT, "model_type": "qwen3_vl_text"},
            "vision_config": QWEN3_VISION,
        },
        **QWEN, "processor": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    },
    "qwen3-vl-moe": {
        "config": {
            "model_type": "qwen3_vl_moe", "vision_config": QWEN3_VISION,
            "text_config": {**QWEN3_TEXT, **QWEN_EXPERTS, "model_type": "qwen3_vl_moe_text"},
        },
        **QWEN, "processor": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    },
    "smolvlm": {
        "config": {"model_type": "smolvlm", "vision_config": SIGLIP, "scale_factor": 2, "tie_word_embeddings": True,
                   "text_config": {**TEXT, "model_type": "llama", "pad_token_id": 0}},
        "tokens": IDEFICS_TOKENS, "image_token": "<image>", "pixels": IDEFICS_PIXELS,
        "processor": "smolvlm.processing_smolvlm.SmolVLMProcessor",
    },
}  # fmt: skip
"""By name: configuration, tokens that its images have, which of them are states, and the image processor's settings."""


def make_picture_checkpoint(folder: Path, name: str, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a seeded random checkpoint in float32, with a tokenizer that has the tokens of images."""
    own = PICTURES[name]
    tokenizer = deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(own["tokens"])})
    image_token_id = tokenizer.convert_tokens_to_ids(own["image_token"])
    torch.manual_seed(0)
    ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in own.get("ids", {}).items()}
    config = AutoConfig.for_model(**{**own["config"], **(ids or {"image_token_id": image_token_id})})
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(own["pixels"]))
    return folder


def image_of(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A random image, [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def expand(name: str, folder: Path, image: npt.NDArray[np.uint8]) -> str:
    """The text that transformers' own processor puts in the place of an image."""
    module, _, kind = PICTURES[name]["processor"].rpartition(".")
    processor = object.__new__(getattr(import_module(f"transformers.models.{module}"), kind))
    family = find_family(folder)
    assert family is not None
    processor.image_token, processor.image_processor = PICTURES[name]["image_token"], load_processor(family, folder)
    processor.fake_image_token, processor.global_image_tag = "<fake_token_around_image>", "<global-img>"
    processor.global_image_token = "<global-img>"
    processor.image_seq_len = 4
    found = load_processor(family, folder)(images=[image], return_tensors="np", **family.arguments)
    text: str = processor.replace_image_token(found, 0)
    return text


@torch.inference_mode()
def generate(
    folder: Path, token_ids: Sequence[int], images: Sequence[npt.NDArray[np.uint8]], max_tokens: int,
    model: PreTrainedModel | None = None,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What transformers generates greedily after a prompt whose placeholders are expanded already, and the
    log-probabilities of these tokens. The images are encoded one by one, as each has a size of its own."""
    model = model or load_reference(folder)
    family = find_family(folder)
    assert family is not None
    processor, features = load_processor(family, folder), []
    if images and "image_grid_thw" in processor.model_input_names:
        return _generate_by_grids(model, family, processor, token_ids, images, max_tokens)
    for image in images:
        arrays = as_arrays(processor(images=[image], return_tensors="np", **family.arguments))
        inputs = {key: torch.from_numpy(value) for key, value in arrays.items() if key not in ("rows", "cols")}
        found = model.model.get_image_features(**inputs, return_dict=True).pooler_output
        features += list(found) if isinstance(found, list | tuple) else [found]
    inputs_ids = torch.tensor([list(token_ids)])
    hidden = model.get_input_embeddings()(inputs_ids)
    if features:
        joined = torch.cat([one.reshape(-1, hidden.shape[-1]) for one in features])
        hidden = hidden.masked_scatter((inputs_ids == family.image_token_id)[..., None], joined)
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(max_tokens):
        logits = model(inputs_embeds=hidden, use_cache=False).logits[0, -1].float()
        token = int(logits.argmax())
        tokens.append(token)
        logprobs.append(float(logits.log_softmax(0)[token]))
        hidden = torch.cat((hidden, model.get_input_embeddings()(torch.tensor([[token]]))), 1)
    return tokens, logprobs


def _generate_by_grids(
    model: PreTrainedModel, family: Any, processor: Any, token_ids: Sequence[int],
    images: Sequence[npt.NDArray[np.uint8]], max_tokens: int,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """The same of models whose positions have three dimensions, by their own `forward`."""
    arrays = as_arrays(processor(images=list(images), return_tensors="np", **family.arguments))
    inputs = {key: torch.from_numpy(value) for key, value in arrays.items()}
    ids, logprobs = list(token_ids), []
    for _ in range(max_tokens):
        ids_T = torch.tensor([ids])
        types_T = (ids_T == family.image_token_id).int()
        logits = model(input_ids=ids_T, mm_token_type_ids=types_T, **inputs, use_cache=False).logits[0, -1].float()
        token = int(logits.argmax())
        ids.append(token)
        logprobs.append(float(logits.log_softmax(0)[token]))
    return ids[len(token_ids) :], logprobs
