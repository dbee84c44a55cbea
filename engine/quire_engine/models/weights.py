"""Compares the tensors that a checkpoint must hold with the headers of its files, without loading any."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.block_scales import with_scales
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.files import StoredTensor, read_header, weight_files
from quire_engine.models.options import LatentAttentionOptions
from quire_engine.models.stacked_experts import with_experts

__all__ = [
    "FLOATING",
    "check_tensors",
    "check_weights",
    "expected_shapes",
    "read_tensors",
    "vocabulary_tensor",
]

logger = logging.getLogger(__name__)

FLOATING = ("F64", "F32", "BF16", "F16")
"""Types that weights are converted from; types of eight bits or fewer need scales."""
INDICES = ("I64",)
"""Types of numbers of tokens."""


def check_weights(
    folder: Path, config: CheckpointConfig, *, reports: bool = False
) -> dict[Path, dict[str, StoredTensor]]:
    """Compare the headers of a checkpoint's files with its configuration.

    Time and memory are bounded by the headers' length, whatever the configuration says.

    Args:
        folder: the checkpoint.
        config: its configuration.
        reports: whether to log how many tensors are not the text model's.

    Returns:
        The tensors of each file, by name without the leading `model.`.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, superfluous, or of another shape or type.
    """

    skipped: list[str] = []

    def rename(name: str) -> str | None:
        if config.has_other_parts:
            whole, name = name, re.sub(r"^(model\.)?language_model\.", "", name)
            if name == whole and not name.startswith("lm_head."):
                skipped.append(name)
                return None
        for theirs, ours in config.options.renamed:
            name = name.replace(theirs, ours)
        return name.removeprefix("model.")

    files = read_tensors(folder, rename)
    if reports and skipped:
        logger.info("%s: served as text; %d tensors of other parts are skipped", folder, len(skipped))
    if config.weight_format.method == "fp8":
        files = with_scales(files, config.weight_format.block_size, FLOATING)
    if config.options.fused:
        shapes = dict(expected_shapes(dataclasses.replace(config, num_layers=1)))
        files = {path: dict(_with_parts(file, config, shapes)) for path, file in files.items()}
    if config.options.experts is not None and config.options.experts.are_stacked:
        files = with_experts(files, config, config.options.experts)
    quantized = {name: tensor.dtype for file in files.values() for name, tensor in file.items() if tensor.scales}

    def kinds(name: str) -> tuple[str, ...]:
        if name in quantized:
            return (quantized[name],)
        return ("I8",) if config.int8 and _is_linear(name) else FLOATING

    last = config.num_layers + config.options.num_extra_layers
    extra = tuple(f"layers.{number}." for number in range(config.num_layers, last))

    # The copy of a tied head, and the frequency tables of old checkpoints, are derived.
    def is_ignored(name: str) -> bool:
        return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq") or name.startswith(extra)

    check_tensors(folder, files, lambda: expected_shapes(config), kinds, is_ignored)
    return files


def _with_parts(
    tensors: Mapping[str, StoredTensor], config: CheckpointConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, StoredTensor]]:
    """Tensors by name, with their parts instead of those that are fused.

    Args:
        tensors: by name.
        config: of the checkpoint.
        shapes: of the parts, by their names in layer 0.

    Raises:
        CheckpointError: a fused tensor has another number of rows than its parts.
    """
    fused = dict(config.options.fused)
    for name, tensor in tensors.items():
        *layer, module, projection, kind = name.split(".") if name.count(".") > 1 else ("", "", "", name)
        parts = [f"{module}.{part}.{kind}" for part in fused.get(projection, ())]
        sizes = [shapes[f"layers.0.{part}"][0] for part in parts if f"layers.0.{part}" in shapes]
        if len(layer) != 2 or not parts or len(sizes) != len(parts):
            yield name, tensor
            continue
        if tensor.shape[:1] != (sum(sizes),):
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; config.json asks for {sum(sizes)} rows"
            )
        ends = list(itertools.accumulate(sizes))
        for part, size, end in zip(parts, sizes, ends, strict=True):
            piece = dataclasses.replace(
                tensor, shape=(size, *tensor.shape[1:]), num_bytes=tensor.num_bytes * size // ends[-1],
                first_row=tensor.first_row + end - size,
            )  # fmt: skip
            yield ".".join((*layer, part)), piece


def read_tensors(folder: Path, rename: Callable[[str], str | None]) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of each safetensors file of a checkpoint, by the name that we have for them.

    Args:
        folder: the checkpoint.
        rename: gives that name, for a name in the file; or None for a tensor that is left out.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    return {
        path: {ours: tensor for name, tensor in read_header(path).items() if (ours := rename(name)) is not None}
        for path in weight_files(folder)
    }


def vocabulary_tensor(folder: Path, config: CheckpointConfig, name: str) -> dict[Path, dict[str, StoredTensor]]:
    """The one tensor of a checkpoint that a model has under this name, in its file; a tied head is the embedding.

    Args:
        folder: the checkpoint.
        config: its configuration.
        name: `lm_head.weight` or `embed_tokens.weight`.

    Raises:
        CheckpointError: see `check_weights`.
    """
    source = "embed_tokens.weight" if config.tie_word_embeddings else name
    files = check_weights(folder, config)
    return {path: {name: file[source]} for path, file in files.items() if source in file}


def check_tensors(
    folder: Path,
    files: Mapping[Path, Mapping[str, StoredTensor]],
    expected_shapes: Callable[[], Iterable[tuple[str, tuple[int, ...]]]],
    kinds: Callable[[str], tuple[str, ...]],
    is_ignored: Callable[[str], bool],
) -> None:
    """Compare the tensors of files with those that are expected.

    Args:
        folder: of the files, for messages.
        files: from `read_tensors`.
        expected_shapes: yields names and shapes; may yield more than fits into memory, if the files do not hold them.
        kinds: the types that a tensor may have.
        is_ignored: whether a tensor that is not expected may be there.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of another shape or type.
    """
    names = {name for file in files.values() for name in file}
    missing = list(islice((name for name, _ in expected_shapes() if name not in names), 3))
    if missing:
        raise CheckpointError(f"{folder}: its safetensors files hold no {', '.join(missing)}")
    expected = dict(expected_shapes())
    for path, file in files.items():
        for name, tensor in file.items():
            if name in expected:
                _check_tensor(tensor, expected[name], kinds(name))
            elif not is_ignored(name):
                raise CheckpointError(f"{path}: tensor {tensor.name} has no place in this architecture")


def _check_tensor(tensor: StoredTensor, shape: tuple[int, ...], allowed: tuple[str, ...]) -> None:
    where = f"{tensor.path}: tensor {tensor.name}"
    if tensor.shape != shape:
        raise CheckpointError(f"{where} has shape {tensor.shape}; config.json asks for {shape}")
    if tensor.dtype not in allowed:
        asks = "it must be" if allowed == INDICES else "quantization_config in config.json asks for"
        asked = f"a floating-point type ({', '.join(allowed)})" if allowed == FLOATING else " or ".join(allowed)
        raise CheckpointError(f"{where} is {tensor.dtype}; {asks} {asked}")


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def expected_shapes(config: CheckpointConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name of each tensor of a checkpoint, without the leading `model.`, and its shape; layer by layer."""
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    options = config.options
    linears = {
        "self_attn.q_proj": (q_size, hidden, options.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, options.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, options.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, options.o_bias),
    }
    norms = dict.fromkeys(options.norms.names, hidden)
    if options.latent is not None:
        linears = _latent_attention(config, options.latent)
        norms["self_attn.kv_a_layernorm"] = options.latent.kv_rank
        if options.latent.query_rank is not None:
            norms["self_attn.q_a_layernorm"] = options.latent.query_rank
    if options.qk_norm:
        norms |= {"self_attn.q_norm": config.head_size, "self_attn.k_norm": config.head_size}
    if options.qk_projection_norm:
        norms |= {"self_attn.q_norm": q_size, "self_attn.k_norm": kv_size}
    yield "embed_tokens.weight", (config.vocab_size, hidden)
    yield "norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        for name, size in norms.items():
            yield f"layers.{i}.{name}.weight", (size,)
        if options.attention_sinks:
            yield f"layers.{i}.self_attn.sinks.weight", (config.num_heads,)
        if options.experts is not None and options.experts.are_in(i):
            yield f"layers.{i}.mlp.gate.weight", (options.experts.num_experts, hidden)
            if options.experts.has_bias:
                yield f"layers.{i}.mlp.gate.bias", (options.experts.num_experts,)
            if options.experts.shared_intermediate_size is not None and options.experts.shared_has_gate:
                yield f"layers.{i}.mlp.shared_expert_gate.weight", (1, hidden)
            if options.experts.grouped is not None and options.experts.grouped.has_bias:
                yield f"layers.{i}.mlp.choice_bias.weight", (options.experts.num_experts,)
        for name, (out_size, in_size, has_bias) in chain(linears.items(), _feed_forward(config, i)):
            yield f"layers.{i}.{name}.weight", (out_size, in_size)
            if config.int8:
                yield f"layers.{i}.{name}.weight_scale", (out_size, 1)
            if has_bias:
                yield f"layers.{i}.{name}.bias", (out_size,)


def _latent_attention(config: CheckpointConfig, latent: LatentAttentionOptions) -> dict[str, tuple[int, int, bool]]:
    """The linear layers of latent attention, likewise."""
    hidden, bias, heads = config.hidden_size, config.options.qkv_bias, config.num_heads
    query_size = heads * (latent.nope_size + latent.rope_size)
    queries = {"q_proj": (query_size, hidden, False)}
    if latent.query_rank is not None:
        queries = {
            "q_a_proj": (latent.query_rank, hidden, bias),
            "q_b_proj": (query_size, latent.query_rank, False),
        }
    linears = {
        **queries,
        "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_size, hidden, bias),
        "kv_b_proj": (heads * (latent.nope_size + latent.value_size), latent.kv_rank, False),
        "o_proj": (hidden, heads * latent.value_size, config.options.o_bias),
    }
    return {f"self_attn.{name}": sizes for name, sizes in linears.items()}


def _feed_forward(config: CheckpointConfig, layer: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
    """The linear layers of a feed-forward, or of each of its experts, with their sizes and whether they have biases."""

    def swiglu(name: str, size: int, bias: bool) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        for part in ("gate_proj", "up_proj"):
            yield f"{name}.{part}", (size, config.hidden_size, bias)
        yield f"{name}.down_proj", (config.hidden_size, size, bias)

    experts = config.options.experts
    if experts is None or not experts.are_in(layer):
        yield from swiglu("mlp", config.intermediate_size, config.options.mlp_bias)
        return
    if experts.shared_intermediate_size is not None:
        yield from swiglu("mlp.shared_expert", experts.shared_intermediate_size, False)
    for i in range(experts.num_experts):
        yield from swiglu(f"mlp.experts.{i}", experts.intermediate_size, experts.has_bias)
