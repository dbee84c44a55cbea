"""A made-up checkpoint of a few kilobytes, for tests that spoil it, and copies of others with changed tensors."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from quire_engine.models import CheckpointConfig
from safetensors.torch import load_file, save_file

__all__ = [
    "CONFIG",
    "POINTER",
    "changed_copy",
    "edit_json",
    "make_small_checkpoint",
    "with_windows",
    "write_checkpoint",
]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 2468\n"
"""What git-LFS leaves in the place of a file."""


def write_checkpoint(folder: Path, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_small_checkpoint(folder: Path) -> Path:
    """Write `config.json`, a tokenizer's file in name only, and weights that are all 0.01."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (32, 16), "norm": (16,)}
    for i in range(2):
        shapes |= {f"layers.{i}.{name}": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"layers.{i}.self_attn.{name}": (size, 16) for name, size in (("q_proj", 16), ("k_proj", 8))}
        shapes |= {f"layers.{i}.self_attn.{name}": (size, 16) for name, size in (("v_proj", 8), ("o_proj", 16))}
        shapes |= {f"layers.{i}.mlp.{name}": (24, 16) for name in ("gate_proj", "up_proj")}
        shapes[f"layers.{i}.mlp.down_proj"] = (16, 24)
    tensors = {f"model.{name}.weight": torch.full(shape, 0.01) for name, shape in shapes.items()}
    write_checkpoint(folder, CONFIG, tensors | {"lm_head.weight": torch.full((32, 16), 0.01)})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def changed_copy(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Copy a checkpoint of one file, with other tensors.

    Args:
        folder: the checkpoint.
        target: where the copy is written; it may exist.
        change: edits the tensors, by name.
    """
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; a file that is a link becomes one of its own."""
    values = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps({**values, **changes}))


def with_windows(config: CheckpointConfig, windows: Sequence[int | None]) -> CheckpointConfig:
    """The same model with a window, or none, in each layer; further windows are ignored."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=window))
        for layer, window in zip(config.options.layers, windows, strict=False)
    )
    return replace(config, options=replace(config.options, layers=layers))
