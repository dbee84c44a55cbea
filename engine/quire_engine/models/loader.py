"""Compares a checkpoint's tensors with those of the model, and loads them, or makes random ones.

The model is built on the device `meta` first, where it takes no memory: its tensors are what the checkpoint must hold.
Each rank then reads only its own slice of each tensor; tensors of other stages are not touched. Pages that have been
read are released, and a matrix is packed as soon as it is complete, so loading takes hardly more memory than the model.
"""

import contextlib
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models.altup import AltUpDecoder
from quire_engine.models.checkpoints import FLOATING, INDICES, StoredTensor, is_of_text_model, open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.checkpoints.parts import part_names, with_experts, with_parts
from quire_engine.models.checkpoints.weight_format import WeightFormat
from quire_engine.models.decoder import Decoder
from quire_engine.models.encoder import Encoder
from quire_engine.models.layers.parallel import LoadTarget, Packable, create_parameters, load_targets
from quire_engine.models.linear import LinearMethod, MethodChoice, conversion, draft_methods, gather, linear_methods
from quire_engine.models.mapped import HugePages
from quire_engine.models.options import AttentionOptions, ExpertsOptions
from quire_engine.models.packed_values import moved
from quire_engine.models.progress import LoadProgress
from quire_engine.models.shared_transformer import SharedTransformerDecoder
from quire_engine.models.weight_cache import WeightCache
from quire_engine.system.memory import trim_heap

logger = logging.getLogger(__name__)

UNQUANTISED = linear_methods(WeightFormat(), None)
PLAIN = LinearMethod()
META = torch.device("meta")
DUMMY_STD = 0.02
"""Standard deviation of random weights, as in the usual initialisation of models before training."""


def new_model(config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> Decoder:
    """A model whose tensors are not loaded."""
    kind: type[Decoder] = Decoder
    options = config.options
    if options.encoder is not None:
        kind = Encoder
    elif options.altup is not None:
        kind = AltUpDecoder
    elif options.shared_transformer is not None:
        kind = SharedTransformerDecoder
    return kind(config, max_model_len, parallel)


def check_weights(folder: Path, config: CheckpointConfig, *, reports: bool = False) -> dict[str, StoredTensor]:
    """Compare the headers of a checkpoint's files with its configuration. Time and memory are bounded by the headers'
    length, not by the configuration.

    Args:
        folder: the checkpoint.
        config: its configuration.
        reports: whether to log how many tensors are not the text model's.

    Returns:
        The checkpoint's tensors, by the model's names.

    Raises:
        CheckpointError: a file is missing or broken; a tensor is missing, superfluous, or of another shape or type.
    """
    options = config.options
    tensors, parts = _named_tensors(folder, config, reports)
    fused, bounded = dict(options.fused), bounded_config(config, len(tensors))
    methods = linear_methods(config.weight_format, None, parts)
    targets = load_targets(build(lambda: new_model(bounded, 1), torch.float32, META, methods))
    if fused:
        tensors = dict(with_parts(tensors, fused, {name: one.shape for name, one in targets.items()}))
    last = config.num_layers + options.num_extra_layers
    extra = tuple(f"layers.{number}." for number in range(config.num_layers, last)) + tuple(
        f"layers.{number}.self_attn.{name}"  # what training left of layers that use another's cache
        for number, layer in enumerate(options.layers)
        if isinstance(layer.attention, AttentionOptions) and layer.attention.cache_of is not None
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )
    if options.mtp is not None:
        extra += ("mtp.", "mtp_layers.")

    # The copy of a tied head, and the frequency tables of old checkpoints, are derived. Quantisers add biases.
    def is_ignored(name: str) -> bool:
        if not options.has_head and not name.startswith("layers."):  # of a task's head
            return True
        is_derived = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq") or name.startswith(extra)
        return is_derived or any(part in name for part in options.skipped) or is_zero_bias(name, tensors)

    check_tensors(folder, tensors, targets, is_ignored)
    if config.head is not None and not config.head.token_ids:
        check_head(folder, config.head.shapes(config.hidden_size), tensors)
    return tensors


def is_zero_bias(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is a bias of zeros beside a quantised weight."""
    if not name.endswith(".bias") or f"{name.removesuffix('.bias')}.weight_scale" not in tensors:
        return False
    with tensors[name].reader as reader:
        return not reader.read(tensors[name], ()).any()


def check_head(folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the tensors of a head, by name, with their shapes. Raises CheckpointError if one is missing, quantised or
    of another shape."""
    targets = {name: LoadTarget(torch.empty(0), shape, ()) for name, shape in shapes.items()}
    check_tensors(folder, {name: tensors[name] for name in targets if name in tensors}, targets, lambda name: False)


def load_head(folder: Path, config: CheckpointConfig) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's head by name, float32. Raises CheckpointError if one is missing or damaged, or has
    a value that is not finite."""
    assert config.head is not None
    if config.head.token_ids:
        return {"lm_head.weight": _load_token_rows(folder, config, config.head.token_ids)}
    tensors = _named_tensors(folder, config, reports=False)[0]
    return read_tensors(folder, config.head.shapes(config.hidden_size), tensors)


def _load_token_rows(folder: Path, config: CheckpointConfig, token_ids: Sequence[int]) -> torch.Tensor:
    """The output matrix's row of a token, or of the second minus the first: [1, E]."""
    tensor = vocabulary_tensor(folder, config, "lm_head.weight").get("lm_head.weight")
    if tensor is None:
        raise CheckpointError(f"{folder}: classifier_from_token needs an output matrix, lm_head or a tied embedding")
    options = config.options
    if tensor.dtype not in FLOATING or tensor.companions or options.logits_soft_cap is not None or options.head_bias:
        raise CheckpointError(
            f"{tensor.path}: classifier_from_token needs an output matrix that is not quantised and has no bias, and "
            "no cap of logits"
        )
    with tensor.reader:
        rows = [
            next(iter(PLAIN.read(tensor, (slice(token_id, token_id + 1), slice(0, config.hidden_size))))).float()
            for token_id in token_ids
        ]
    return (rows[-1] if len(rows) == 1 else rows[1] - rows[0]) / config.options.logits_divisor


def read_tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, float32, which must have these shapes. Raises CheckpointError like `load_head`."""
    check_head(folder, shapes, tensors)
    found = {}
    for name in shapes:
        tensor = tensors[name]
        with tensor.reader as reader:
            found[name] = reader.read(tensor, ()).to(torch.float32, copy=True)
        check_finite(found[name], found[name], f"{tensor.path}: tensor {tensor.name}")
    return found


def _named_tensors(
    folder: Path, config: CheckpointConfig, reports: bool
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors of a checkpoint by the model's names; and with those that are fused by the names of their parts."""
    options, experts = config.options, config.experts
    stored = open_checkpoint(folder).tensors
    if config.has_other_parts:
        is_text = list(filter(is_of_text_model, stored))
        if reports and len(is_text) < len(stored):
            others = len(stored) - len(is_text)
            said = "%s: the text model has %d tensors; %d of other parts are skipped"
            logger.info(said, folder, len(is_text), others)
        stored = {name: stored[name] for name in is_text}

    def rename(name: str) -> str:
        # transformers 5 saves Qwen3.5's text model, alone too, under the name that it has in the whole model.
        name = name.partition("language_model.")[2] or name.removeprefix("model.text_model.")
        for theirs, ours in options.renamed:
            name = name.replace(theirs, ours)
        return name.removeprefix("model.")

    tensors = {rename(name): tensor for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        if name.endswith(".choice_bias.weight") and tensor.shape[:-1] == (1,):  # of the only group of experts
            tensors[name] = replace(tensor, shape=tensor.shape[1:], matrix=0)
    if experts is not None and experts.stack is not None:
        tensors = dict(with_experts(tensors, config, experts))
    tensors, fused = gather(config.weight_format, tensors), dict(options.fused)
    return tensors, {part: tensor for name, tensor in tensors.items() for part in part_names(name, fused) or [name]}


def bounded_config(config: CheckpointConfig, num_tensors: int) -> CheckpointConfig:
    """The same configuration with no more layers and experts than it takes to find one whose tensors are missing: each
    layer has more than one tensor, and each expert three, or two without a gate."""
    layers = config.options.layers[: max(num_tensors, 1)]
    num_mixtures = sum(layer.mixture is not None for layer in layers)
    if config.experts is not None and num_mixtures:
        most = num_tensors // ((3 if config.experts.expert.is_gated else 2) * num_mixtures) + 1
        experts = replace(config.experts, num_experts=min(config.experts.num_experts, most))
        layers = tuple(
            replace(one, mlp=experts) if isinstance(one.mlp, ExpertsOptions) else
            replace(one, experts=one.experts and experts)
            for one in layers
        )  # fmt: skip
    return replace(config, options=replace(config.options, layers=layers))


def vocabulary_tensor(folder: Path, config: CheckpointConfig, name: str) -> dict[str, StoredTensor]:
    """The tensors of the embedding or the head of a checkpoint, by their names in the model; a tied head is the
    embedding. `name` is that of the weight. Raises CheckpointError like `check_weights`."""
    module, tensors = name.removesuffix(".weight"), check_weights(folder, config)
    there = "embed_tokens" if config.tie_word_embeddings else module
    kinds = [one.removeprefix(there) for one in tensors if one.startswith(f"{there}.")]
    return {f"{module}{kind}": tensors[f"{there}{kind}"] for kind in kinds}


def check_tensors(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    targets: Mapping[str, LoadTarget],
    is_ignored: Callable[[str], bool],
) -> None:
    """Compare the tensors of a checkpoint's folder, by the model's names, with the targets of a model. Raises
    CheckpointError if a tensor is missing, superfluous, or of another shape or type.

    Args:
        folder: for messages.
        tensors: of the checkpoint.
        targets: of the model.
        is_ignored: whether a tensor that is not the model's may be there.
    """
    absent = [name for name in targets if name not in tensors]
    absent.sort(key=lambda name: int(name.split(".")[1]) if name.startswith("layers.") else -1)
    if absent:
        reader = next((tensor.reader for tensor in tensors.values()), None)
        files = f"{'safetensors' if reader is None else reader.format_name} files"
        raise CheckpointError(f"{folder}: its {files} hold no {', '.join(absent[:3])}")
    for name, tensor in tensors.items():
        if name in targets:
            _check_tensor(tensor, targets[name])
        elif not is_ignored(name):
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has no place in this architecture")


def _check_tensor(tensor: StoredTensor, target: LoadTarget) -> None:
    where = f"{tensor.path}: tensor {tensor.name}"
    if tensor.shape != target.shape:
        source = tensor.reader.config_name
        raise CheckpointError(f"{where} has shape {tensor.shape}; {source} asks for {target.shape}")
    if tensor.dtype not in target.stored and not tensor.companions:
        is_quantized = target.stored != INDICES and tensor.reader.config_name == "config.json"
        asks = "quantization_config in config.json asks for" if is_quantized else "it must be"
        asked = " or ".join(target.stored)
        if target.stored == FLOATING:
            asked = f"a floating-point type ({', '.join(FLOATING)})"
        raise CheckpointError(f"{where} is {tensor.dtype}; {asks} {asked}")


def load_model(
    folder: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    max_model_len: int,
    parallel: ParallelState = ParallelState(),
    quantization: str | None = None,
    device: torch.device = CPU,
    load_format: str = "auto",
    cache: WeightCache | None = None,
) -> Decoder:
    """Build a rank's part of the model on a device, fill every parameter, and pack the matrices, quantised as the
    checkpoint or the setting says.

    With the load format `dummy` no weight file is read, and the weights are random numbers, the same each time. Where
    the cache has the packed weights, the checkpoint is not read.

    Raises:
        CheckpointError: a file is truncated; a tensor is missing, superfluous, of the wrong shape or type, or holds
            a value that is not finite; or the architecture is not listed, and its model is not computed as our
            decoder computes it.
    """
    if not config.is_listed and parallel.rank == 0:
        from quire_engine.models.fallback.wrapper import check_text  # imports transformers' models

        check_text(folder)
    is_dummy, weight_format = load_format == "dummy", config.weight_format
    if is_dummy and weight_format.method == "gguf":  # random scales would not be finite
        weight_format = WeightFormat()

    def make(tensors: Mapping[str, StoredTensor] | None) -> Decoder:
        methods = linear_methods(weight_format, quantization, tensors)
        return build(lambda: new_model(config, max_model_len, parallel), dtype, device, methods)

    converted = conversion(config.weight_format, dtype, quantization)
    if converted is not None and parallel.rank == 0:
        logger.info("%s: %s", folder, converted)
    model: Decoder | None = None
    if cache is not None:
        is_plain = weight_format.method == "unquantised"  # then no method depends on the tensors
        model = cache.load(lambda: make(None if is_plain else _named_tensors(folder, config, reports=False)[1]))
    if model is None and is_dummy:
        model = make(None)
        randomize(model)
    elif model is None:
        # First, so that nothing is allocated for a configuration that does not match the files.
        tensors = check_weights(folder, config, reports=parallel.rank == 0)
        model = make(tensors)
        load_tensors(model, tensors, reports=parallel.rank == 0)
    model.pack()
    return model.eval()


Model = TypeVar("Model", bound=nn.Module)


def build(
    make: Callable[[], Model], dtype: torch.dtype, device: torch.device, methods: MethodChoice = UNQUANTISED
) -> Model:
    """Make a module whose parameters are of a dtype, on a device, and give its linear layers their methods."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else device:
            model = make()
            create_parameters(model, methods)
            return model
    finally:
        torch.set_default_dtype(previous)


def load_draft_model(
    make: Callable[[], Model],
    target: Decoder,
    target_config: CheckpointConfig,
    tensors: Mapping[str, StoredTensor],
    quantization: str | None,
    device: torch.device,
) -> Model:
    """Build what drafts for a target, beside it, and fill and pack it; its matrices are quantised as the target's are.
    Raises CheckpointError like `load_tensors`."""
    methods = draft_methods(target_config.weight_format, quantization, tensors)
    model = build(make, target.dtype, device, methods)
    load_tensors(model, tensors)
    if isinstance(model, Decoder):
        model.pack()
    return model.eval()


def load_tensors(model: nn.Module, tensors: Mapping[str, StoredTensor], *, reports: bool = True) -> None:
    """Fill every parameter of a module from `build`, and pack the matrices. Tensors that are not in its `load_targets`
    are left alone. Raises CheckpointError if a file is damaged, or a tensor holds a value that is not finite."""
    loading = _Loading(model)
    progress = LoadProgress(sum(tensors[name].num_bytes for name in loading.targets), reports=reports)
    with contextlib.ExitStack() as stack:
        for reader in {id(tensor.reader): tensor.reader for tensor in tensors.values()}.values():
            stack.enter_context(reader)
        for name, tensor in tensors.items():
            if name in loading.targets:  # else another stage's, or derived
                loading.fill(name, tensor)
                progress.add(tensor.num_bytes)
    assert not loading.targets, f"the headers had {sorted(loading.targets)[:3]}"
    loading.finish()
    trim_heap()


def randomize(model: nn.Module) -> None:
    """Fill every parameter of a module from `build` with random numbers, and pack the matrices."""
    loading = _Loading(model)
    for name in sorted(loading.targets):
        loading.fill(name, None)
    loading.finish()


class _Loading:
    def __init__(self, model: nn.Module) -> None:
        self.targets = load_targets(model)
        """By name; only of tensors that are not loaded yet."""
        self._num_missing: Counter[Packable | None] = Counter(target.module for target in self.targets.values())
        self._pages = HugePages()
        self._late: list[Packable] = []
        """Complete modules that are packed by `finish`."""

    def fill(self, name: str, tensor: StoredTensor | None) -> None:
        """Fill a parameter with a tensor, or with random numbers for None, and pack its module if that completes it.
        Drops the target first, as it keeps the parameter alive."""
        target = self.targets.pop(name)
        module, is_on_cpu = target.module, target.parameter.is_cpu
        if tensor is None:
            _randomize(target.parameter, name)
        else:
            first, source = 0, f"{tensor.path}: tensor {tensor.name}"
            for band in (PLAIN if module is None else module.method).read(tensor, target.index):
                rows = target.parameter[first : first + len(band)]
                rows.copy_(band)
                check_finite(band, rows, source)
                first += len(band)
                del rows
        if target.scale != 1 and tensor is not None:
            target.parameter.mul_(target.scale)
        if target.offset:
            target.parameter.add_(target.offset)
        del target
        self._num_missing[module] -= 1
        if module is not None and not self._num_missing[module]:
            if module.packs_late:
                self._late.append(module)
            else:
                self._pack(module, is_on_cpu)

    def finish(self) -> None:
        """Pack the modules whose form depends on other parameters."""
        for module in self._late:
            self._pack(module, module.input_norm[0].weight.is_cpu)

    def _pack(self, module: Packable, is_on_cpu: bool) -> None:
        module.pack()
        if is_on_cpu and module.packed_weight is not None:
            with contextlib.suppress(TypeError):  # only its own method knows what it is
                module.use_packed(**moved({"packed": module.packed_weight}, self._pages.take))


def check_finite(tensor: torch.Tensor, parameter: torch.Tensor, source: str) -> None:
    """Reject weights that would make every logit NaN: raise CheckpointError if a weight is NaN or infinite, or becomes
    so in the model's dtype.

    If a row's sum is finite, all of its terms are; this takes one pass over what was just copied. Rows whose sum is not
    finite are checked again, as the sum may have overflowed.

    Args:
        tensor: as it is stored.
        parameter: the same in the model's dtype.
        source: for messages.
    """
    if not parameter.is_floating_point() or not parameter.numel():
        return
    suspicious = (~parameter.sum(-1).isfinite()).reshape(-1).nonzero().flatten().tolist()
    rows, stored_rows = (each.reshape(-1, each.shape[-1]) for each in (parameter, tensor))
    for row in suspicious:
        columns = (~rows[row].isfinite()).nonzero().flatten().tolist()
        if columns:
            value = stored_rows[row, columns[0]].item()
            if math.isfinite(value):
                dtype = str(parameter.dtype).removeprefix("torch.")
                mend = f"that is too large for {dtype}; set dtype to float32 or bfloat16"
            else:
                mend = "weights must be finite numbers"
            raise CheckpointError(f"{source} holds {value}; {mend}")


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random float32 weights of these shapes, the same each time."""
    found = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, tensor in found.items():
        _randomize(tensor, name)
    return found


def _randomize(parameter: torch.Tensor, name: str) -> None:
    """The values depend only on the name: replicas on several ranks are the same, and so is every load."""
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    if parameter.dtype == torch.int8:
        parameter.random_(-127, 128, generator=generator)
    elif not parameter.is_floating_point():
        parameter.random_(generator=generator)
    else:
        parameter.normal_(std=DUMMY_STD, generator=generator)
