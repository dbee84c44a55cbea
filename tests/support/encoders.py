"""Small seeded checkpoints of encoders, in odd shapes, and what transformers computes of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import edit_json
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

__all__ = ["ENCODERS", "VOCAB_SIZE", "expected_states", "make_encoder"]

VOCAB_SIZE = 515
SIZES: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 132, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 160,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "bert-odd": {**SIZES, "hidden_size": 60, "intermediate_size": 101, "hidden_act": "gelu_new"},
    "roberta": {**SIZES, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**SIZES, "pad_token_id": 1, "type_vocab_size": 2, "hidden_size": 192},
    "distilbert": {"dim": 96, "hidden_dim": 132, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 160},
    "modernbert": {**SIZES, "num_hidden_layers": 4, "local_attention": 14},
    "modernbert-biases": {
        **SIZES, "local_attention": 30, "attention_bias": True, "mlp_bias": True, "norm_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mpnet": {**SIZES, "max_position_embeddings": 162, "pad_token_id": 1},
    "mpnet-odd": {**SIZES, "hidden_size": 60, "intermediate_size": 101, "max_position_embeddings": 162},
    "jina_embeddings_v3": {**SIZES, "type_vocab_size": 1, "pad_token_id": 1},
    "nomic_bert": SIZES,
    "gte": {**SIZES, "type_vocab_size": 2},
    "eurobert": {**SIZES, "num_key_value_heads": 2},
    "gemma3_text": {
        **SIZES, "num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 20,
        "use_bidirectional_attention": True, "query_pre_attn_scalar": 24,
    },
}  # fmt: skip
"""Learned positions and none; heads and rows that the kernels take, and others; positions that begin after that of
padding; biases of distances; windows, of some layers and beginning with the first; biases and none; gates and none."""


def make_encoder(folder: Path, name: str, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype) -> Path:
    """Write a checkpoint of one of `ENCODERS`, whose biases and norms are random too."""
    settings = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0,
                "sep_token_id": 1, "initializer_range": 0.1, "initializer_cutoff_factor": 3.0}  # fmt: skip
    given = {**settings, **ENCODERS[name]}
    config = AutoConfig.for_model(name.partition("-odd")[0].partition("-biases")[0], **given)
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "relative_attention_bias" in parameter_name:
            torch.nn.init.normal_(parameter)
        elif parameter.dim() == 1:  # of a norm
            torch.nn.init.normal_(parameter, 0.0 if name == "gemma3_text" else 1.0, std=0.2)
    model.to(dtype).save_pretrained(folder)
    if "sliding_window" in given:  # which the configuration has halved
        edit_json(folder / "config.json", sliding_window=given["sliding_window"])
    tokenizer.save_pretrained(folder)
    return folder


def expected_states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The last hidden states of each prompt, [T, E] float32, computed alone and without padding."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
