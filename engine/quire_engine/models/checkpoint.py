"""A Hugging Face checkpoint folder: its configuration, and whether its files are all there.

Reads JSON and safetensors headers only; knows nothing of torch.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError

__all__ = ["ARCHITECTURES", "CheckpointConfig", "RopeConfig", "check_checkpoint", "weight_files"]

ARCHITECTURES = ("LlamaForCausalLM",)
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters, under the names of `config.json`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What `config.json` and `generation_config.json` say that the engine needs."""

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    int8: bool
    """The linear layers' weights are int8 with a `weight_scale` per output feature, for int8 activations (W8A8)."""
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> "CheckpointConfig":
        """Read and check the configuration.

        Raises:
            CheckpointError: the folder or file is missing, or describes a model that cannot be served.
        """
        if not folder.is_dir():
            raise CheckpointError(f"model: there is no folder {folder}; give the path of a Hugging Face checkpoint")
        config = _read_json(folder / "config.json")
        architecture = (config.get("architectures") or ["(none named)"])[0]
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{folder / 'config.json'}: unknown architecture {architecture}; known are {', '.join(ARCHITECTURES)}"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{folder / 'config.json'}: hidden_act is {config['hidden_act']}; it must be silu")
        try:
            num_heads = int(config["num_attention_heads"])
            checkpoint = cls(
                architecture=architecture,
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_size=int(config.get("head_dim") or config["hidden_size"] // num_heads),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                int8=_is_int8(folder, config),
                rope=_rope_config(folder, config),
                eos_token_ids=_eos_token_ids(folder, config),
            )
            checkpoint._check(folder / "config.json")
            return checkpoint
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder / 'config.json'}: {error!r} is missing or not a number") from None

    def check_parallel(self, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> None:
        """Check that the model can be cut among so many ranks.

        Raises:
            ValueError: it cannot; names the setting, the size that is in the way, and what would be right.
        """
        reason = self._indivisible(tensor_parallel_size)
        if reason is not None:
            right = [size for size in range(1, self.num_heads + 1) if self._indivisible(size) is None]
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel_size}; {reason}; for this model it must be "
                f"{' or '.join(map(str, right))}"
            )
        if pipeline_parallel_size > self.num_layers:
            raise ValueError(
                f"pipeline_parallel_size is {pipeline_parallel_size}; it must be at most num_hidden_layers="
                f"{self.num_layers}, as each stage has at least one layer"
            )

    def _indivisible(self, ranks: int) -> str | None:
        """Why the layers cannot be cut into so many slices; None when they can."""
        for name, size in (("num_attention_heads", self.num_heads), ("intermediate_size", self.intermediate_size)):
            if size % ranks:
                return f"{name}={size} is no multiple of it"
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            return f"num_key_value_heads={self.num_kv_heads} is neither a multiple nor a divisor of it"
        return None if ranks <= self.vocab_size else f"vocab_size={self.vocab_size} is less"

    def _check(self, path: Path) -> None:
        """Refuse what would fail later, and less clearly."""
        if self.dtype not in DTYPES:
            raise CheckpointError(f"{path}: dtype is {self.dtype}; known are {', '.join(DTYPES)}")
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{path}: num_attention_heads is {self.num_heads}; it must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise CheckpointError(f"{path}: the head size is {self.head_size}; it must be even")


def check_checkpoint(folder: Path, tokenizer_folder: Path | None = None, load_format: str = "auto") -> CheckpointConfig:
    """Check everything that can be known without loading: configuration, tokenizer, weight files, tensors' shapes.

    Args:
        folder: the checkpoint.
        tokenizer_folder: where the tokenizer is, when it is elsewhere.
        load_format: with `dummy` there need be no weight files.

    Returns:
        The configuration.

    Raises:
        CheckpointError: what is missing, truncated or of the wrong shape.
    """
    config = CheckpointConfig.from_folder(folder)
    tokenizer_folder = tokenizer_folder or folder
    if not any((tokenizer_folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{tokenizer_folder}: there is no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy its files there, or "
            "name another folder with the setting tokenizer"
        )
    if load_format == "dummy":
        return config
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        shapes |= check_safetensors(path)
    _check_shapes(folder, config, shapes)
    return config


def _expected_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """Name of each tensor of a Llama checkpoint, without the leading `model.`, → its shape."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"layers.{i}.post_attention_layernorm.weight"] = (hidden,)
        for name, (out_size, in_size, has_bias) in linears.items():
            shapes[f"layers.{i}.{name}.weight"] = (out_size, in_size)
            if config.int8:
                shapes[f"layers.{i}.{name}.weight_scale"] = (out_size, 1)
            if has_bias:
                shapes[f"layers.{i}.{name}.bias"] = (out_size,)
    return shapes


def _check_shapes(folder: Path, config: CheckpointConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what the headers of a checkpoint's files say with what its configuration asks for.

    Args:
        folder: of the checkpoint.
        config: its configuration.
        found: name of each tensor in its files → shape.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    shapes = {name.removeprefix("model."): shape for name, shape in found.items()}
    expected = _expected_shapes(config)
    missing = expected.keys() - shapes.keys()
    if missing:
        raise CheckpointError(f"{folder}: its safetensors files hold no {', '.join(sorted(missing)[:3])}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(f"{folder}: tensor {name} has shape {shapes[name]}; config.json asks for {shape}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, whole or sharded.

    Raises:
        CheckpointError: there are none, or a shard that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        for name in names:
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder / name}: this shard is missing, though {index.name} names it")
        return [folder / name for name in names]
    whole = folder / "model.safetensors"
    if not whole.is_file():
        raise CheckpointError(f"{folder}: there is no model.safetensors and no {index.name}; only safetensors are read")
    return [whole]


def check_safetensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Check that a safetensors file is as long as its header says.

    ::

        | 8 bytes: header length, little endian | header, JSON | tensors, at offsets that the header gives |

    Returns:
        Name of each tensor → shape.

    Raises:
        CheckpointError: the file is truncated or has no valid header.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            if header_size > size:
                raise CheckpointError(f"{path}: truncated; the file ends within its header")
            header = json.loads(file.read(header_size))
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        data_size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {key: tuple(entry["shape"]) for key, entry in entries.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: truncated or not a safetensors file") from None
    expected = 8 + header_size + data_size
    if size != expected:
        raise CheckpointError(f"{path}: truncated; it has {size} bytes and its header speaks of {expected}")
    return shapes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: there is no {path.name}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def _is_int8(folder: Path, config: dict[str, Any]) -> bool:
    """Whether this is a compressed-tensors checkpoint in W8A8, the one quantised kind that is served.

    Raises:
        CheckpointError: it is quantised in another way.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return False
    groups = list(quantization.get("config_groups", {}).values())
    weights, activations = ((groups[0].get(kind) or {}) if groups else {} for kind in ("weights", "input_activations"))
    is_w8a8 = (
        quantization.get("quant_method") == "compressed-tensors"
        and quantization.get("format") == "int-quantized"
        and len(groups) == 1
        and groups[0].get("targets") == ["Linear"]
        and quantization.get("ignore") == ["lm_head"]
        and _is_symmetric_int8(weights, "channel", dynamic=False)
        and _is_symmetric_int8(activations, "token", dynamic=True)
    )
    if not is_w8a8:
        method, form = (quantization.get(name, "not named") for name in ("quant_method", "format"))
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization_config has quant_method {method}, format {form}; of quantised "
            "checkpoints only compressed-tensors with int8 weights per channel and dynamic int8 activations per token, "
            "both symmetric, of all linear layers but lm_head, are served. From an unquantised checkpoint the setting "
            "quantization makes one of these"
        )
    return True


def _is_symmetric_int8(kind: dict[str, Any], strategy: str, dynamic: bool) -> bool:
    return (
        (kind.get("num_bits"), kind.get("type"), kind.get("strategy")) == (8, "int", strategy)
        and bool(kind.get("symmetric", True))
        and bool(kind.get("dynamic", False)) == dynamic
    )


def _rope_config(folder: Path, config: dict[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{folder / 'config.json'}: rope_type is {rope_type}; known are {', '.join(ROPE_TYPES)}")
    default = RopeConfig()
    return RopeConfig(
        rope_type=rope_type,
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or default.rope_theta),
        factor=float(rope.get("factor", default.factor)),
        low_freq_factor=float(rope.get("low_freq_factor", default.low_freq_factor)),
        high_freq_factor=float(rope.get("high_freq_factor", default.high_freq_factor)),
        original_max_position_embeddings=int(
            rope.get("original_max_position_embeddings", default.original_max_position_embeddings)
        ),
    )


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """`generation_config.json` has the last word, as it may name several."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(int(token_id) for token_id in (eos if isinstance(eos, list) else [eos]))
