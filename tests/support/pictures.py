"""Small checkpoints of models that take images, with random weights; images; and what transformers makes of them."""

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from quire_engine.encoders.families.idefics3 import in_words
from quire_engine.encoders.family import as_arrays, find_family, load_processor, load_video_processor
from support.checkpoints import edit_json
from support.oracle import load_reference
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata

__all__ = [
    "PICTURES",
    "expand",
    "expand_video",
    "generate",
    "image_of",
    "make_picture_checkpoint",
    "states_of",
    "video_arrays",
]

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
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)), "<video>",
)  # fmt: skip
IDEFICS = {
    "fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>", "image_seq_len": 4,
}  # fmt: skip
IDEFICS_PIXELS = {"size": {"longest_edge": 4 * 28}, "max_image_size": {"longest_edge": 28}}
GEMMA_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
GEMMA4_VISION = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 8, "patch_size": 2, "position_embedding_size": 700,
    "use_clipped_linears": True, "initializer_range": 0.2,
}  # fmt: skip
GEMMA4 = {
    "tokens": ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"), "image_token": "<|image|>",
    "ids": {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "audio_token_id": "<|audio|>"},
    "pixels": {"patch_size": 2, "max_soft_tokens": 70}, "types": "mm_token_type_ids",
    "processor": "gemma4.processing_gemma4.Gemma4Processor",
    "attributes": {"boi_token": "<|image>", "eoi_token": "<image|>"}, "needs_ids": True, "video_token": "<|video|>",
}  # fmt: skip
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "num_hidden_layers": 3}
LLAVA = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
SQUARE_PIXELS = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
GRID = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
PIXTRAL = {
    **SIGLIP, "model_type": "pixtral", "num_attention_heads": 2, "head_dim": 12, "hidden_act": "silu", "image_size": 84,
}  # fmt: skip
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL_PIXELS = {"size": {"longest_edge": 84}, "patch_size": {"height": 7, "width": 7}}
PIXTRAL_ATTRIBUTES = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "patch_size": 7}
OVIS_TOKENS = ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
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
    "video_token": "<|video_pad|>",
}  # fmt: skip
QWEN2_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}}
QWEN3_TEXT = {
    **TEXT, "head_dim": 16, "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
}  # fmt: skip
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# With 1e-6 the norm of a linear layer's output that is near 0 amplifies rounding, also that of plain torch's kernels.
QWEN_HYBRID = {
    **TEXT, "rms_norm_eps": 0.03, "head_dim": 32, "num_hidden_layers": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
    },
}  # fmt: skip
GLM = {
    "tokens": ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"), "image_token": "<|image|>",
    "around": "<|begin_of_image|>{}<|end_of_image|>", "processor": "glm4v.processing_glm4v.Glm4vProcessor",
    "pixels": {"patch_size": 7, "size": {"shortest_edge": 2 * 14 * 14, "longest_edge": 60 * 14 * 14}},
    "video_token": "<|video|>",
    "ids": {
        "image_token_id": "<|image|>", "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>", "video_token_id": "<|video|>",
    },
}  # fmt: skip
GLM_TEXT = {
    **TEXT, "pad_token_id": 0, "head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
GLM_VISION = {**QWEN_VISION, "image_size": 28}
NOT_THE_MODELS = ("input_ids", "rows", "cols", "num_crops", "num_patches", "num_soft_tokens_per_image")
"""What processors make beside the arguments of models."""
PICTURES: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "config": {"model_type": "aya_vision", "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
                   "downsample_factor": 2, "alignment_intermediate_size": 48, "vision_feature_layer": -1,
                   "vision_feature_select_strategy": "full", "text_config": {
            **TEXT, "model_type": "cohere2", "pad_token_id": 0, "num_hidden_layers": 4, "head_dim": 16,
            "sliding_window": 16, "sliding_window_pattern": 2, "logit_scale": 1.0,
        }},
        "tokens": ("<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
        "image_token": "<image>", "ids": {"image_token_index": "<|IMG_PATCH|>"},
        "pixels": {"size": {"height": 28, "width": 28}, "max_patches": 6},
        "image_processor": "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        "arguments": {"crop_to_patches": True}, "settings": {"patch_size": 14, "img_size": 28},
        "processor": "aya_vision.processing_aya_vision.AyaVisionProcessor", "attributes": {
            "patch_size": 14, "img_size": 28, "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>", "img_patch_token": "<|IMG_PATCH|>", "tile_token": "TILE",
            "tile_global_token": "TILE_GLOBAL",
        },
    },
    "deepseek_vl": {
        "config": {"model_type": "deepseek_vl", "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
                   "text_config": {**TEXT, "model_type": "llama", "pad_token_id": 0}},
        "tokens": ("<image_placeholder>",), "image_token": "<image_placeholder>",
        "pixels": {"size": {"height": 28, "width": 28}}, "settings": {"num_image_tokens": 16},
        "names": {"image_token": "<image_placeholder>"},
        "image_processor": "deepseek_vl.image_processing_pil_deepseek_vl.DeepseekVLImageProcessorPil",
        "processor": "deepseek_vl.processing_deepseek_vl.DeepseekVLProcessor", "attributes": {"num_image_tokens": 16},
    },
    "exaone4_5": {
        "config": {"model_type": "exaone4_5", "vision_config": {
            **QWEN_VISION, "num_key_value_heads": 1, "window_size": 28, "fullatt_block_indexes": [1],
        }, "text_config": {**TEXT, "model_type": "exaone4_5_text", "pad_token_id": 0, "head_dim": 16}},
        "tokens": ("<|image_pad|>", "<vision>", "</vision>", "<|video_pad|>"), "image_token": "<|image_pad|>",
        "around": "<vision>{}</vision>", "pixels": QWEN["pixels"],
        "ids": {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        "names": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        "image_processor": "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        "processor": "exaone4_5.processing_exaone4_5.Exaone4_5_Processor",
    },
    "gemma3": {
        "config": {"model_type": "gemma3", "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
                   "mm_tokens_per_image": 4, "text_config": {
            **TEXT, "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 16,
            "sliding_window_pattern": 3, "query_pre_attn_scalar": 32, "pad_token_id": 0,
        }},
        "tokens": GEMMA_TOKENS, "image_token": GEMMA_TOKENS[0], "pixels": {"size": {"height": 28, "width": 28}},
        "ids": {"image_token_index": GEMMA_TOKENS[0], "boi_token_index": GEMMA_TOKENS[1],
                "eoi_token_index": GEMMA_TOKENS[2]},
        "processor": "gemma3.processing_gemma3.Gemma3Processor", "types": "token_type_ids",
        "attributes": {
            "full_image_sequence": f"\n\n<start_of_image>{4 * GEMMA_TOKENS[0]}<end_of_image>\n\n",
        },
    },
    "gemma4": {
        "config": {"model_type": "gemma4", "audio_config": None, "vision_config": GEMMA4_VISION, "text_config": {
            **TEXT, "model_type": "gemma4_text", "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32,
            "sliding_window": 80, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "use_bidirectional_attention": "vision",
        }},
        **GEMMA4,
    },
    "gemma4-e": {
        "config": {"model_type": "gemma4", "audio_config": None, "vision_config": GEMMA4_VISION, "text_config": {
            **TEXT, "model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32,
            "sliding_window": 80, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 4160,
            "num_kv_shared_layers": 2, "pad_token_id": 3, "use_bidirectional_attention": None,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        }},
        **GEMMA4,
    },
    "glm46v": {
        "config": {
            "model_type": "glm46v", "text_config": {**GLM_TEXT, "model_type": "glm4v_text"},
            "vision_config": GLM_VISION,
        },
        **GLM, "processor": "glm46v.processing_glm46v.Glm46VProcessor",
    },
    "glm4v": {
        "config": {
            "model_type": "glm4v", "text_config": {**GLM_TEXT, "model_type": "glm4v_text"}, "vision_config": GLM_VISION,
        },
        **GLM,
    },
    "glm4v-moe": {
        "config": {"model_type": "glm4v_moe", "vision_config": GLM_VISION, "text_config": {
            **GLM_TEXT, "model_type": "glm4v_moe_text", "n_routed_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 40, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        }},
        **GLM,
    },
    "idefics3": {
        "config": {"model_type": "idefics3", "vision_config": SIGLIP, "scale_factor": 2, "text_config": {
            **TEXT, "model_type": "llama", "pad_token_id": 0,
        }},
        "tokens": IDEFICS_TOKENS, "image_token": "<image>", "pixels": IDEFICS_PIXELS,
        "processor": "idefics3.processing_idefics3.Idefics3Processor", "attributes": IDEFICS,
    },
    "internvl": {
        "config": {"model_type": "internvl", "vision_config": {
            **SIGLIP, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7],
        }, "text_config": {**TEXT, "model_type": "qwen2", "pad_token_id": 0}},
        "tokens": ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"), "image_token": "<IMG_CONTEXT>",
        "pixels": {"size": {"height": 28, "width": 28}, "max_patches": 6},
        "processor": "internvl.processing_internvl.InternVLProcessor",
        "attributes": {"start_image_token": "<img>", "end_image_token": "</img>", "image_seq_length": 4},
    },
    "llava": {
        "config": {"model_type": "llava", "vision_config": CLIP, "text_config": {
            **TEXT, "model_type": "llama", "pad_token_id": 0,
        }},
        "tokens": ("<image>",), "image_token": "<image>", "ids": {"image_token_index": "<image>"},
        "pixels": SQUARE_PIXELS, "processor": "llava.processing_llava.LlavaProcessor", "attributes": LLAVA,
    },
    "llava_next": {
        "config": {"model_type": "llava_next", "vision_config": CLIP, "image_grid_pinpoints": GRID, "text_config": {
            **TEXT, "model_type": "mistral", "pad_token_id": 0,
        }},
        "tokens": ("<image>",), "image_token": "<image>", "ids": {"image_token_index": "<image>"},
        "pixels": {**SQUARE_PIXELS, "image_grid_pinpoints": GRID},
        "processor": "llava_next.processing_llava_next.LlavaNextProcessor", "attributes": LLAVA,
    },
    "llava_onevision": {
        "config": {"model_type": "llava_onevision", "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
                   "image_grid_pinpoints": GRID, "vision_aspect_ratio": "anyres_max_2", "text_config": {
            **TEXT, "model_type": "qwen2", "pad_token_id": 0,
        }},
        "tokens": ("<image>", "<video>"), "image_token": "<image>",
        "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
        "pixels": {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": GRID},
        "processor": "llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        "attributes": {"num_image_tokens": 16, "vision_feature_select_strategy": "full",
                       "vision_aspect_ratio": "anyres_max_2"},
    },
    "mistral3": {
        "config": {"model_type": "mistral3", "vision_config": PIXTRAL, "text_config": {
            **TEXT, "model_type": "mistral", "pad_token_id": 0,
        }},
        "tokens": PIXTRAL_TOKENS, "image_token": "[IMG]", "ids": {"image_token_index": "[IMG]"},
        "pixels": PIXTRAL_PIXELS, "processor": "pixtral.processing_pixtral.PixtralProcessor",
        "attributes": {**PIXTRAL_ATTRIBUTES, "spatial_merge_size": 2},
    },
    "ovis2": {
        "config": {"model_type": "ovis2", "hidden_size": 64, "vocab_size": 4160, "vision_config": {
            **SIGLIP, "model_type": "ovis2_vision", "vocab_size": 45, "hidden_stride": 2,
        }, "text_config": {**TEXT, "model_type": "qwen2", "pad_token_id": 0}},
        "tokens": ("<image>", *OVIS_TOKENS), "image_token": "<image>",
        "ids": {"image_token_id": "<IMG_ATOM>", "visual_indicator_token_ids": list(OVIS_TOKENS[1:])},
        "pixels": {"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 4, "crop_to_patches": True},
        "image_processor": "ovis2.image_processing_pil_ovis2.Ovis2ImageProcessorPil",
        "settings": {"image_seq_length": 4}, "processor": "ovis2.processing_ovis2.Ovis2Processor",
        "attributes": {"image_seq_length": 4}, "rows_alone": True,
    },
    "pixtral": {
        "config": {"model_type": "llava", "vision_config": PIXTRAL, "vision_feature_layer": -1,
                   "vision_feature_select_strategy": "full", "text_config": {
            **TEXT, "model_type": "mistral", "pad_token_id": 0,
        }},
        "tokens": PIXTRAL_TOKENS, "image_token": "[IMG]", "ids": {"image_token_index": "[IMG]"},
        "pixels": PIXTRAL_PIXELS, "processor": "pixtral.processing_pixtral.PixtralProcessor",
        "attributes": {**PIXTRAL_ATTRIBUTES, "spatial_merge_size": 1},
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
        "processor": "smolvlm.processing_smolvlm.SmolVLMProcessor", "attributes": IDEFICS,
    },
}  # fmt: skip
"""By name: configuration, tokens that its images have, which of them are states, the image processor's settings, and
the processor with its attributes; fields that name other tokens, and what the model calls the types of tokens, if there
are any."""


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
        elif parameter.dim() == 1 or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if "names" in own:
        edit_json(folder / "tokenizer_config.json", extra_special_tokens=own["names"])
    (folder / "preprocessor_config.json").write_text(json.dumps(own["pixels"]))
    if "settings" in own:
        (folder / "processor_config.json").write_text(json.dumps(own["settings"]))
    return folder


def image_of(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A random image, [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def expand(name: str, folder: Path, image: npt.NDArray[np.uint8]) -> str:
    """The text that transformers' own processor puts in the place of an image."""
    module, _, kind = PICTURES[name]["processor"].rpartition(".")
    # Pixtral's needs torchvision, for an image processor that is not used.
    others = {f"transformers.models.{module.replace('processing', 'image_processing')}": Mock()}
    with patch.dict(sys.modules, others if "pixtral" in module else {}):
        processor = object.__new__(getattr(import_module(f"transformers.models.{module}"), kind))
    family = find_family(folder)
    assert family is not None
    processor.image_token, processor.image_processor = PICTURES[name]["image_token"], load_processor(family, folder)
    arguments = PICTURES[name].get("arguments", family.arguments)
    if "image_processor" in PICTURES[name]:
        module, _, kind = PICTURES[name]["image_processor"].rpartition(".")
        processor.image_processor = getattr(import_module(f"transformers.models.{module}"), kind)(
            **PICTURES[name]["pixels"]
        )
    for attribute, value in PICTURES[name].get("attributes", {}).items():
        setattr(processor, attribute, value)
    found = processor.image_processor(images=[image], return_tensors="np", **arguments)
    text: str = processor.replace_image_token(found, 0)
    return text


def video_arrays(folder: Path, frames: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """What a tower takes of a video, [frames, height, width, 3]."""
    family = find_family(folder)
    assert family is not None
    videos = load_video_processor(family, folder)
    assert videos is not None
    return dict(family.prepare_video(videos.processor, [Image.fromarray(frame) for frame in frames])[0])


def expand_video(name: str, folder: Path, frames: npt.NDArray[np.uint8], fps: float) -> str:
    """The text that transformers' own processor puts in the place of a video."""
    module, _, kind = PICTURES[name]["processor"].rpartition(".")
    own = import_module(f"transformers.models.{module}")
    processor, states = object.__new__(getattr(own, kind)), np.zeros((1, len(frames)))
    arrays = video_arrays(folder, frames)
    attributes = {
        "image_token": PICTURES[name]["image_token"], "vision_start_token": "<|vision_start|>",
        "video_token": PICTURES[name].get("video_token", "<video>"),
        "vision_end_token": "<|vision_end|>", "video_processor": Mock(merge_size=2, temporal_patch_size=2),
    }  # fmt: skip
    for attribute, value in (attributes | PICTURES[name].get("attributes", {})).items():
        setattr(processor, attribute, value)
    metadata = VideoMetadata(total_num_frames=len(frames), fps=fps, frames_indices=list(range(len(frames))))
    inputs = {
        "video_metadata": [metadata], "pixel_values_videos": states, "pixel_values": states,
        "video_grid_thw": _whole_grid(arrays),
    }  # fmt: skip
    if "image_position_ids" in arrays:  # of Gemma 4, which pools 9 patches
        inputs["num_soft_tokens_per_video"] = [(arrays["image_position_ids"][0, :, 0] >= 0).sum() // 9]
    # A package that is not installed; other tests compare its words.
    with patch.object(own, "num2words", in_words, create=True):
        text: str = processor.replace_video_token(inputs, 0)
    return text


def _whole_grid(arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """The grid of a video, whose frames may have one each."""
    grid = arrays.get("image_grid_thw")
    return None if grid is None else np.array([[grid[:, 0].sum(), *grid[0, 1:]]])


@torch.inference_mode()
def states_of(
    folder: Path, image: npt.NDArray[np.uint8], model: PreTrainedModel | None = None
) -> tuple[torch.Tensor, dict[str, npt.NDArray[Any]]]:
    """The hidden states that transformers computes of an image, [n, E], and what its image processor makes of it."""
    model, family = model or load_reference(folder), find_family(folder)
    assert family is not None
    arrays = as_arrays(load_processor(family, folder)(images=[image], return_tensors="np", **family.arguments))
    inputs = {key: torch.from_numpy(value) for key, value in arrays.items() if key not in NOT_THE_MODELS}
    found = model.model.get_image_features(**inputs, return_dict=True).pooler_output
    rows = [one.reshape(-1, one.shape[-1]) for one in (found if isinstance(found, list | tuple) else [found])]
    return torch.cat(rows), arrays


@torch.inference_mode()
def generate(
    folder: Path, token_ids: Sequence[int], images: Sequence[npt.NDArray[np.uint8]], max_tokens: int,
    model: PreTrainedModel | None = None, name: str | None = None,
    videos: Sequence[tuple[npt.NDArray[np.uint8], float]] = (),
) -> tuple[list[int], list[float]]:  # fmt: skip
    """What transformers generates greedily after a prompt whose placeholders are expanded already, and the
    log-probabilities of these tokens. The images are encoded one by one, as each has a size of its own. Videos are
    frames, and how many a second has; images and videos are together only where positions have three dimensions."""
    model = model or load_reference(folder)
    inner = getattr(model, "model", None)
    if getattr(inner, "rope_deltas", None) is not None:
        inner.rope_deltas = None  # of an earlier prompt
    family = find_family(folder)
    assert family is not None
    processor, features = load_processor(family, folder), []
    has_grids = "image_grid_thw" in getattr(processor, "model_input_names", ())
    if (videos or images) and (has_grids or (name is not None and PICTURES[name].get("needs_ids"))):
        return _generate_by_ids(model, family, processor, token_ids, images, max_tokens, folder, videos)
    features += [states_of(folder, image, model)[0] for image in images]
    state_id = family.image_token_id
    for frames, _ in videos:
        inputs = {key: torch.from_numpy(value) for key, value in video_arrays(folder, frames).items()}
        if family.video_token_id is not None:
            pixels, state_id = inputs["pixel_values"][None], family.video_token_id
            features.append(model.model.get_video_features(pixels, return_dict=True).pooler_output)
        else:
            found = model.model.get_image_features(**inputs, return_dict=True).pooler_output
            features += list(found) if isinstance(found, list | tuple) else [found]
    inputs_ids = torch.tensor([list(token_ids)])
    hidden = model.get_input_embeddings()(inputs_ids)
    if features:
        joined = torch.cat([one.reshape(-1, hidden.shape[-1]) for one in features])
        hidden = hidden.masked_scatter((inputs_ids == state_id)[..., None], joined)
    tokens: list[int] = []
    logprobs: list[float] = []
    types = name and PICTURES[name].get("types")
    for _ in range(max_tokens):
        own_types = {}
        if types:
            own_types[types] = torch.zeros(hidden.shape[:2], dtype=torch.int64)
            own_types[types][:, : len(token_ids)] = inputs_ids == family.image_token_id
        logits = model(inputs_embeds=hidden, use_cache=False, **own_types).logits[0, -1].float()
        token = int(logits.argmax())
        tokens.append(token)
        logprobs.append(float(logits.log_softmax(0)[token]))
        hidden = torch.cat((hidden, model.get_input_embeddings()(torch.tensor([[token]]))), 1)
    return tokens, logprobs


def _generate_by_ids(
    model: PreTrainedModel, family: Any, processor: Any, token_ids: Sequence[int],
    images: Sequence[npt.NDArray[np.uint8]], max_tokens: int, folder: Path,
    videos: Sequence[tuple[npt.NDArray[np.uint8], float]],
) -> tuple[list[int], list[float]]:  # fmt: skip
    """The same of models that need the ids of tokens, as their positions have three dimensions or their layers have
    inputs of their own, by their own `forward`."""
    arrays = as_arrays(processor(images=list(images), return_tensors="np", **family.arguments)) if images else {}
    inputs = {key: torch.from_numpy(value) for key, value in arrays.items() if key not in NOT_THE_MODELS}
    if videos:
        found = [video_arrays(folder, frames) for frames, _ in videos]
        inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate([one["pixel_values"] for one in found]))
        if "image_position_ids" in found[0]:  # of Gemma 4
            positions = np.concatenate([one["image_position_ids"] for one in found])
            inputs["video_position_ids"] = torch.from_numpy(positions)
            inputs["num_frames_per_video"] = torch.tensor([len(frames) for frames, _ in videos])
        else:
            grids = [grid for one in found if (grid := _whole_grid(one)) is not None]
            inputs["video_grid_thw"] = torch.from_numpy(np.concatenate(grids))
        if "second_per_grid_ts" in signature(model.forward).parameters:
            inputs["second_per_grid_ts"] = torch.tensor([2 / fps for _, fps in videos])
    ids, logprobs, has_types = list(token_ids), [], "mm_token_type_ids" in signature(model.forward).parameters
    for _ in range(max_tokens):
        ids_T = torch.tensor([ids])
        if has_types:
            is_image, is_video = ids_T == family.image_token_id, ids_T == family.video_token_id
            if videos and not is_video.any():  # of GLM's, whose tokens are those of images
                is_image, is_video = is_video, is_image
            inputs["mm_token_type_ids"] = is_image.int() + 2 * is_video.int()
        logits = model(input_ids=ids_T, **inputs, use_cache=False).logits[0, -1].float()
        token = int(logits.argmax())
        ids.append(token)
        logprobs.append(float(logits.log_softmax(0)[token]))
    return ids[len(token_ids) :], logprobs
