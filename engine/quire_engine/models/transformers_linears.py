"""Linear layers of transformers' models, computed by our kernels: faster on the CPU, and a row's result does not depend
on the batch."""

import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from quire_kernels import LinearWeight, embedding, linear, pack_linear
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire_engine.models.loader import check_finite
from quire_engine.system.memory import release_pages


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
    those of classes of their own and those whose weights the model's code reads itself.

    Each module's pages of the files are released before the next is read.

    Args:
        model: its parameters may be views of files.
        mapped: the addresses of the files.
        source: of the parameters, for messages.

    Raises:
        CheckpointError: a parameter holds a value that is not finite.
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


def packed_parameters(model: nn.Module) -> int:
    """How many parameters were packed."""
    return sum(module.num_parameters for module in model.modules() if isinstance(module, PackedLinear))


def _packed(module: Any, weight_NK: torch.Tensor) -> PackedLinear:
    packed = PackedLinear(weight_NK, None if module.bias is None else module.bias.data)
    module.weight = module.bias = None  # freed before the next is packed, unless the embedding has it too
    return packed
