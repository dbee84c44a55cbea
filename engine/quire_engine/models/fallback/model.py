"""TransformersModel: a decoder of transformers' own modelling code, with our attention.

Nothing here knows an architecture. Loading runs the model over a few tokens, with an attention that only records how it
is called and gives each token its own value back (`Probe`). What is found is checked: all layers call it, positions are
those that are given, no token reaches another one but through it, and the head reads only what the layers give. Then
the tokens are computed in two steps with our attention. Each layer's result must agree with that of the model's own.

The tokens of a step are one sequence of transformers', [1, T], whose attention knows the requests from the context.
Linear layers are computed by our kernels: faster on the CPU, and a row's result does not depend on the batch.
"""

import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from quire_kernels import LinearWeight, embedding, linear, pack_linear
from quire_kernels.kv_cache import new_kv_cache
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError, cut
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.base import replace_rows
from quire_engine.models.checkpoints import weight_files
from quire_engine.models.fallback.attention import EXACT, PAGED, PROBE, Probe, Step, UnfitModelError
from quire_engine.models.fallback.checkpoint import SERVED, TransformersCheckpoint
from quire_engine.models.loader import check_finite
from quire_engine.models.step_context import ContextBuilder, KVCaches, RowColumn, StepContext, StepRows
from quire_engine.system.memory import mapped_ranges, release_pages, trim_heap

PROBE_TOKENS = 6
CLOSE = 1e-3
"""How much two runs may differ that compute the same, relative to their mean size. With another attention, or other
tokens, they differ by about that size."""
CLOSE_HALF = 0.02
"""The same, in half precision. Layers of SmolLM2-135M differ by 0.002, with any tokens."""

logger = logging.getLogger(__name__)


class TransformersModel:
    """A `CausalLM` of one rank, of a causal language model of transformers' that was loaded with the attention `PROBE`.
    Raises UnfitModelError if our attention cannot take the place of its own."""

    def __init__(self, model: Any, num_layers: int, max_position: int) -> None:
        self.parallel = ParallelState()
        self.recordable = None
        self.row_columns: Sequence[RowColumn] = ()
        self.dtype: torch.dtype = model.dtype
        self._model, self._decoder = model, model.get_decoder()
        self._given: Any = None
        """What the layers return while the head computes."""
        self._computed_forward = self._decoder.forward
        if "position_ids" not in inspect.signature(self._computed_forward).parameters:
            raise UnfitModelError("takes no positions")
        self._decoder.forward = self._decoder_forward
        token_ids = torch.arange(1, PROBE_TOKENS + 1, device=model.device)[None] % model.config.vocab_size
        position_ids = torch.arange(PROBE_TOKENS, device=model.device)[None]
        with torch.inference_mode():
            probe = Probe(max_position)
            hidden_TE = self._probe(probe, num_layers, token_ids.clone(), position_ids)
            self.hidden_size = hidden_TE.shape[1]
            self._compare(list(probe.layers), token_ids, position_ids)

    def _probe(
        self, probe: Probe, num_layers: int, token_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Find out how its layers attend; returns the hidden states of some tokens."""
        run = self._decoder(input_ids=token_ids, position_ids=position_ids, use_cache=False)
        hidden = run.last_hidden_state
        self._output_type = type(run)
        if not bool(hidden.isfinite().all()):
            raise UnfitModelError("computes numbers that are not finite; its weights are, or are too large for dtype")
        if len(probe.layers) != num_layers:
            raise UnfitModelError(f"has {num_layers} layers, of which {len(probe.layers)} call the attention interface")
        if not self._agree(hidden, self._decoder(input_ids=token_ids, use_cache=False).last_hidden_state):
            raise UnfitModelError("counts positions in another way than from 0")
        token_ids[0, 0] = 0
        others = self._decoder(input_ids=token_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        if not self._agree(hidden[:, 1:], others[:, 1:]):
            raise UnfitModelError("mixes tokens in other ways than by attention")
        logits = self._model(input_ids=token_ids, position_ids=position_ids, use_cache=False).logits
        if not self._agree(logits[0].float(), self.compute_logits(others[0])):
            raise UnfitModelError("computes logits of more than its layers' results")
        self._attentions = self._active = probe.attach()
        self._layers = _layer_list(self._decoder, list(probe.layers))
        return torch.as_tensor(hidden[0])

    def _compare(self, modules: list[nn.Module], token_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Compute some tokens with the model's own attention, and in two steps with ours.

        Each of the modules that call the attention is compared alone, and passes on its own result: in half precision
        layers may enlarge the rounding errors of those before them to any size.
        """
        own: dict[nn.Module, torch.Tensor] = {}
        computed = slice(0, PROBE_TOKENS)

        def compare(module: nn.Module, _: Any, out: Any) -> Any:
            result = out if isinstance(out, torch.Tensor) else out[0]
            expected = own.setdefault(module, result)[:, computed]
            if not self._agree(expected, result):
                raise UnfitModelError("computes other results with our attention than with its own")
            return expected if result is out else (expected, *out[1:])

        hooks = [module.register_forward_hook(compare) for module in modules]
        self._model.set_attn_implementation(EXACT)
        own_logits = self._model(input_ids=token_ids, position_ids=position_ids, use_cache=False).logits[0].float()
        self._model.set_attn_implementation(PAGED)
        device, shapes = token_ids.device, [(1, one.num_kv_heads, 16, one.head_size) for one in self.state_specs]
        kv_caches: KVCaches = [
            (new_kv_cache(*shape, self.dtype, device), new_kv_cache(*shape, self.dtype, device)) for shape in shapes
        ]
        contexts = ContextBuilder(self.state_specs, kv_caches, [np.zeros((1, 1), dtype=np.int64)], 16)
        half, logits = PROBE_TOKENS // 2, []
        for begin, end in ((0, half), (half, PROBE_TOKENS)):
            positions, zeros = np.arange(begin, end), np.zeros(end - begin, dtype=np.int64)
            rows = StepRows(
                slots=zeros[:1], query_start_loc=np.array([0, end - begin]), seq_lens=np.array([end]), token_ids=zeros,
                token_slots=zeros, positions=positions, slot_mappings=[positions],
            )  # fmt: skip
            computed = slice(begin, end)
            hidden_TE = self.forward(token_ids[0, begin:end], contexts.upload(rows)[0], kv_caches)
            logits.append(self.compute_logits(hidden_TE))
        for hook in hooks:
            hook.remove()
        if not self._agree(own_logits, torch.cat(logits)):
            raise UnfitModelError("computes other results with our attention than with its own")

    def _agree(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        tolerance = CLOSE if self.dtype == torch.float32 else CLOSE_HALF
        return bool((one - other).abs().float().mean() <= tolerance * one.abs().float().mean())

    @property
    def state_specs(self) -> list[AttentionSpec]:
        return [attention.spec for attention in self._active]

    @property
    def layer_numbers(self) -> list[int]:
        return [attention.number for attention in self._active]

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        prompt: dict[str, torch.Tensor] = {"input_ids": token_ids_T[None]}
        if embedded is not None:
            hidden_TE = self._decoder.get_input_embeddings()(token_ids_T)
            replace_rows(hidden_TE, embedded)
            prompt = {"inputs_embeds": hidden_TE[None]}
        step = Step(context, dict(zip(self.layer_numbers, kv_caches, strict=True)))
        for attention in self._active:
            attention.step = step
        try:
            out = self._decoder(**prompt, position_ids=context.positions[None], use_cache=False)
        finally:
            for attention in self._active:
                attention.step = None  # it refers to the caches
        return torch.as_tensor(out.last_hidden_state[0])

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """[S, E] -> [S, V] float32, with the model's own scales and soft caps."""
        self._given = self._output_type(last_hidden_state=hidden_SE[None])
        try:
            ids = torch.zeros(1, len(hidden_SE), dtype=torch.int64, device=hidden_SE.device)
            return torch.as_tensor(self._model(input_ids=ids, use_cache=False).logits[0]).float()
        finally:
            self._given = None

    def _decoder_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._computed_forward(*args, **kwargs) if self._given is None else self._given

    @contextlib.contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Inside the block, the model has only these layers; all of them, if they are not in one list."""
        if self._layers is None:
            yield
            return
        parent, name = self._layers
        all_layers, attentions = getattr(parent, name), self._active
        first = {attention.spec: attention for attention in reversed(attentions)}
        self._active = sorted(first.values(), key=lambda attention: attention.number)
        setattr(parent, name, nn.ModuleList([all_layers[attention.number] for attention in self._active]))
        try:
            yield
        finally:
            setattr(parent, name, all_layers)
            self._active = attentions

    def num_parameters(self) -> int:
        """A tied head counts once."""
        unpacked = sum(int(parameter.numel()) for parameter in self._model.parameters())
        return unpacked + sum(one.num_parameters for one in self._model.modules() if isinstance(one, PackedLinear))


def _layer_list(decoder: nn.Module, modules: list[nn.Module]) -> tuple[nn.Module, str] | None:
    """The parent and name of the list of layers with one of the modules each, in order; None if there is no such
    list."""
    names = {module: name for name, module in decoder.named_modules()}
    for path, layers in decoder.named_modules():
        is_list = isinstance(layers, nn.ModuleList) and len(layers) == len(modules)
        if is_list and all(names[module].startswith(f"{path}.{i}.") for i, module in enumerate(modules)):
            parent, _, name = path.rpartition(".")
            return decoder.get_submodule(parent), name
    return None


class PackedLinear(nn.Module):
    """In the place of `nn.Linear` and `Conv1D`."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        super().__init__()
        self.packed = pack_linear(weight_NK, bias_N)
        self.num_parameters = weight_NK.numel() + (0 if bias_N is None else bias_N.numel())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        return linear(x.flatten(0, -2), self.packed).view(*x.shape[:-1], -1)


class PackedEmbedding(nn.Module):
    """In the place of the `nn.Embedding` that a head is tied to; the weight is there once."""

    def __init__(self, packed: LinearWeight) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., E]."""
        return embedding(token_ids.flatten(), self.packed).view(*token_ids.shape, -1)


def pack_weights(model: Any, mapped: Sequence[range], source: str) -> None:
    """Check the parameters of a loaded model of transformers', make them its own, and pack its linear layers, but for
    those of classes of their own and those whose weights the model's code reads itself. Each module's pages of the
    files are released before the next is read. Raises CheckpointError if a parameter is not finite.

    Args:
        model: its parameters may be views of files.
        mapped: the addresses of the files.
        source: of the parameters, for messages.
    """
    read = set(re.findall(r"\bself\.(\w+)\.weight\b", inspect.getsource(sys.modules[type(model).__module__])))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(table, "weight", ())
    is_shared = tied and type(table) is nn.Embedding

    def is_packable(path: str, module: nn.Module) -> bool:
        is_linear = type(module) in (nn.Linear, Conv1D) and path.rpartition(".")[2] not in read
        return is_linear and not (tied and not is_shared and module is head)

    for path, module in list(model.named_modules()):
        if is_shared and module is table:
            continue  # it shares what the head has
        is_packed = is_packable(path, module)
        stored = dict(module.named_parameters(path, recurse=False)) | dict(module.named_buffers(path, recurse=False))
        views = []
        for name, tensor in stored.items():
            values = tensor.data
            if isinstance(tensor, nn.Parameter):
                check_finite(values, values, f"{source}: tensor {name}")
            if any(values.data_ptr() in mapping for mapping in mapped):
                views.append(values)
                if not is_packed:
                    tensor.data = values.clone()
        if is_packed:
            parent, _, name = path.rpartition(".")
            weight = module.weight.data
            packed = _packed(module, weight.t().contiguous() if type(module) is Conv1D else weight)
            setattr(model.get_submodule(parent), name, packed)
        for view in views:
            release_pages(view.data_ptr(), view.nbytes)
    packed_head = model.get_output_embeddings()
    if is_shared and isinstance(packed_head, PackedLinear):
        model.set_input_embeddings(PackedEmbedding(packed_head.packed))


def _packed(module: Any, weight_NK: torch.Tensor) -> PackedLinear:
    packed = PackedLinear(weight_NK, None if module.bias is None else module.bias.data)
    module.weight = module.bias = None  # freed before the next is packed, unless the embedding has it too
    return packed


def load_transformers_model(
    folder: Path,
    checkpoint: TransformersCheckpoint,
    dtype: torch.dtype,
    max_position: int,
    device: torch.device,
    load_format: str,
) -> TransformersModel:
    """Load a model with transformers' own code and its own mapping of names, from safetensors files alone; with the
    load format `dummy` its weights are random. Raises CheckpointError if a tensor is missing or of the wrong shape, or
    the model cannot run with our attention."""
    name = checkpoint.architecture
    Probe(max_position)  # registers the name of the attention, which is checked
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class: Any = getattr(transformers, name)
        mapped: list[range] = []
        if load_format == "dummy":
            model = model_class._from_config(config, dtype=dtype, attn_implementation=PROBE)
        else:
            model, info = model_class.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation=PROBE, local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
            for problem in ("missing_keys", "mismatched_keys"):
                if info[problem]:
                    raise CheckpointError(f"{folder}: {problem.replace('_', ' ')}: {cut(str(sorted(info[problem])))}")
            mapped = mapped_ranges(weight_files(folder))
        model = model.to(device).eval()
        pack_weights(model, mapped, str(folder))
        trim_heap()
        model = TransformersModel(model, checkpoint.num_layers, max_position)
    except CheckpointError:
        raise
    except UnfitModelError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {name} {error}; {SERVED}") from None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {name} does not load with transformers' code: {cut(str(error))}") from error
    logger.info(
        "%s runs with transformers' own modelling code, with our attention, KV cache and sampler: it is slower than a "
        "family of our own", name,
    )  # fmt: skip
    return model
