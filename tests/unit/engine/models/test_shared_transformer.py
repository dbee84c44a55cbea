"""Zamba2: what its files say, and blocks of attention and feed-forward that layers share."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.layers.parallel import num_parameters
from quire_engine.models.loader import META, build, new_model
from quire_engine.models.options import AttentionOptions, MambaOptions, MLPOptions
from quire_engine.models.shared_transformer import SharedTransformerDecoder
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

PUBLISHED: dict[str, Any] = {
    "adapter_rank": 128, "add_bias_linear": False, "architectures": ["Zamba2ForCausalLM"], "attention_head_dim": 128,
    "attention_hidden_size": 4096, "bos_token_id": 1, "chunk_size": 256, "eos_token_id": 2, "hidden_act": "gelu",
    "hidden_size": 2048, "intermediate_size": 8192, "kv_channels": 64, "mamba_d_conv": 4, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 1, "max_position_embeddings": 4096, "model_type": "zamba2",
    "n_mamba_heads": 64, "num_attention_heads": 32, "num_hidden_layers": 6, "num_key_value_heads": 32,
    "num_mem_blocks": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000, "time_step_limit": None, "torch_dtype": "bfloat16",
    "use_conv_bias": True, "use_long_context": False, "use_mem_rope": True, "use_shared_attention_adapter": True,
    "vocab_size": 32000,
    "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
}  # fmt: skip
"""With the fields of the published file of 1.2B, and fewer layers."""


def config_of(folder: Path, **changes: Any) -> CheckpointConfig:
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    return CheckpointConfig.from_folder(folder)


@pytest.mark.parametrize("stored", [False, True], ids=["as published", "as transformers stores it"])
def test_as_transformers_reads_it(stored: bool, tmp_path: Path) -> None:
    theirs = AutoConfig.for_model(**PUBLISHED)
    given = json.loads(theirs.to_json_string(use_diff=False)) if stored else {}
    config = config_of(tmp_path, **given)
    for name in ("vocab_size", "max_position_embeddings", "hidden_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (32, 32, theirs.attention_head_dim)
    assert [layer.attention is not None for layer in config.options.layers] == [
        kind == "hybrid" for kind in theirs.layers_block_type
    ]
    for layer in config.options.layers:
        assert layer.state == MambaOptions(
            num_heads=64, head_size=theirs.mamba_headdim, num_groups=1, state_size=128, conv_size=4, norm_eps=1e-5
        )
    attention, mlp = config.options.layers[2].attention, config.options.layers[2].mlp
    assert isinstance(attention, AttentionOptions)
    assert attention.rope is not None
    assert (attention.head_size, attention.scale, attention.qkv_bias) == (128, 64**-0.5, False)
    assert mlp == MLPOptions(intermediate_size=8192, activation="gelu")
    shared = config.options.shared_transformer
    assert shared is not None
    assert (shared.num_blocks, shared.rank, shared.adapts_attention) == (1, 128, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers_block_type": ["mamba"] * 5},
            "it must be one of linear_attention, mamba, hybrid for each of 6 layers",
        ),
        ({"layers_block_type": None}, "layer_types is None; it must be one of linear_attention, mamba, hybrid for"),
        ({"num_hidden_layers": 300, "layers_block_type": ["hybrid"] * 300}, "it must be hybrid for at most 256 layers"),
        ({"num_attention_heads": 30}, "num_attention_heads is 30; it must be a divisor of hidden_size=2048"),
        (
            {"num_key_value_heads": 8},
            "num_key_value_heads is 8; it must be 32, as use_shared_attention_adapter is true",
        ),
        (
            {"attention_head_dim": 64},
            "attention_head_dim is 64; it must be 128, as attention sees twice the hidden_size",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False; it must be true, as transformers shares"),
        ({"use_long_context": True}, "use_long_context is True; it must be false"),
        ({"num_mem_blocks": 0}, "num_mem_blocks is 0; it must be an integer from 1"),
        ({"adapter_rank": 0}, "adapter_rank is 0; it must be an integer from 1"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'; it must be one of"),
    ],
)
def test_what_is_wrong_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as rejected:
        config_of(tmp_path, **changes)
    assert message in str(rejected.value)


def test_blocks_are_held_once(checkpoint: Callable[[str], Path]) -> None:
    """By one rank as often as in the file, which has a block once; by a stage, if a layer of its own uses it."""
    folder = checkpoint("zamba2")
    config, stored = CheckpointConfig.from_folder(folder), load_file(folder / "model.safetensors")

    def make(parallel: ParallelState) -> SharedTransformerDecoder:
        model = build(lambda: new_model(config, 64, parallel), torch.float32, META)
        assert isinstance(model, SharedTransformerDecoder)
        return model

    assert num_parameters(make(ParallelState())) == sum(one.numel() for one in stored.values())
    stages = [make(ParallelState(rank=rank, pipeline_parallel_size=5)) for rank in range(5)]
    assert [list(stage.shared_transformer) for stage in stages] == [[], ["0"], ["1"], [], ["0"]]
    assert [len(stage.state_specs) for stage in stages] == [1, 2, 2, 1, 2]


def test_copies_of_a_block_are_ignored(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Other tools than transformers write a tensor that is shared once for each layer. What is missing is named."""
    shutil.copytree(checkpoint("zamba2"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    first, copy = "model.layers.1.shared_transformer.", "model.layers.4.shared_transformer."
    assert not any(name.startswith(copy) for name in weights)
    copies = {name.replace(first, copy): one.clone() for name, one in weights.items() if name.startswith(first)}
    save_file({**weights, **copies}, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path)
    del weights[f"{first}feed_forward.gate_up_proj_adapter_list.2.1.weight"]
    save_file({**weights, **copies}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hold no layers\.4\.mlp_products\.up\.gate\.weight"):
        check_checkpoint(tmp_path)
