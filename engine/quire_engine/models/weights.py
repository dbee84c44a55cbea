"""Compares the tensors that a checkpoint must hold with the headers of its files, without loading any."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.files import StoredTensor, check_files, check_tokenizer, read_header, weight_files

__all__ = ["check_checkpoint", "check_weights", "expected_shapes"]

FLOATING = ("F64", "F32", "BF16", "F16")
"""Types that weights are converted from; types of eight bits or fewer need scales."""


def check_checkpoint(folder: Path, tokenizer_folder: Path | None = None, load_format: str = "auto") -> CheckpointConfig:
    """Check everything that can be checked without loading: configuration, tokenizer, weight files, tensors' shapes.

    Args:
        folder: the checkpoint.
        tokenizer_folder: the tokenizer's folder, if it is another one.
        load_format: `dummy` needs no weight files.

    Returns:
        The configuration.

    Raises:
        CheckpointError: something is missing, truncated or of the wrong shape.
    """
    check_files(folder)
    config = CheckpointConfig.from_folder(folder)
    check_tokenizer(tokenizer_folder or folder)
    if load_format != "dummy":
        check_weights(folder, config)
    return config


def check_weights(folder: Path, config: CheckpointConfig) -> dict[Path, dict[str, StoredTensor]]:
    """Compare the headers of a checkpoint's files with its configuration.

    Time and memory are bounded by the headers' length, whatever the configuration says.

    Returns:
        The tensors of each file, by name without the leading `model.`.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, superfluous, or of another shape or type.
    """
    files = {path: read_header(path) for path in weight_files(folder)}
    tensors = {name.removeprefix("model."): tensor for file in files.values() for name, tensor in file.items()}
    missing = list(islice((name for name, _ in expected_shapes(config) if name not in tensors), 3))
    if missing:
        raise CheckpointError(f"{folder}: its safetensors files hold no {', '.join(missing)}")
    expected = dict(expected_shapes(config))
    for path, file in files.items():
        for full_name, tensor in file.items():
            name = full_name.removeprefix("model.")
            if name in expected:
                _check_tensor(full_name, tensor, expected[name], config.int8)
            # The copy of a tied head, and the frequency tables of old checkpoints, are derived.
            elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"{path}: tensor {full_name} has no place in this architecture")
    return {
        path: {name.removeprefix("model."): tensor for name, tensor in file.items()} for path, file in files.items()
    }


def _check_tensor(name: str, tensor: StoredTensor, shape: tuple[int, ...], is_int8: bool) -> None:
    if tensor.shape != shape:
        raise CheckpointError(f"{tensor.path}: tensor {name} has shape {tensor.shape}; config.json asks for {shape}")
    allowed = ("I8",) if is_int8 and _is_linear(name) else FLOATING
    if tensor.dtype not in allowed:
        asked = "I8" if allowed == ("I8",) else f"a floating-point type ({', '.join(allowed)})"
        raise CheckpointError(
            f"{tensor.path}: tensor {name} is {tensor.dtype}; quantization_config in config.json asks for {asked}"
        )


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def expected_shapes(config: CheckpointConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name of each tensor of a checkpoint, without the leading `model.`, and its shape; layer by layer."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    options = config.options
    linears = {
        "self_attn.q_proj": (q_size, hidden, options.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, options.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, options.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, options.o_bias),
        "mlp.gate_proj": (intermediate, hidden, options.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, options.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, options.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if options.qk_norm:
        norms |= {"self_attn.q_norm": config.head_size, "self_attn.k_norm": config.head_size}
    yield "embed_tokens.weight", (config.vocab_size, hidden)
    yield "norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        for name, size in norms.items():
            yield f"layers.{i}.{name}.weight", (size,)
        for name, (out_size, in_size, has_bias) in linears.items():
            yield f"layers.{i}.{name}.weight", (out_size, in_size)
            if config.int8:
                yield f"layers.{i}.{name}.weight_scale", (out_size, 1)
            if has_bias:
                yield f"layers.{i}.{name}.bias", (out_size,)
