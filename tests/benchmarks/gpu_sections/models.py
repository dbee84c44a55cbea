"""Checkpoints without weights: the shapes of Llama 3.2 1B and Llama 3.1 8B, for `load_format="dummy"`."""

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["CONFIGS", "TOKENIZER", "make_folder"]

TOKENIZER = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"
"""The demo model's: its ids are the first of the vocabularies below."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "1B": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"tie_word_embeddings": True, "rope_parameters": ROPE | {"factor": 32.0}},
    "8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    | {"tie_word_embeddings": False, "rope_parameters": ROPE | {"factor": 8.0}},
    "tiny": LLAMA
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 1024}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    | {"rope_parameters": ROPE | {"factor": 8.0}, "bos_token_id": 0, "eos_token_id": 1},
}
"""Their `config.json`; `tiny` is for smoke tests."""


def make_folder(name: str, parent: Path) -> Path:
    """A folder of that name with configuration and tokenizer, made if it is not there."""
    folder = parent / name
    if not folder.exists():
        shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
        shutil.copy(TOKENIZER / "tokenizer_config.json", folder)
        (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=1) + "\n")
    return folder
