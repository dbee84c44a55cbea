"""Linear layers of transformers' models, computed by our kernels: faster on the CPU, and a row's result does not depend
on the batch."""

from typing import Any

import torch
from quire_kernels import LinearWeight, embedding, linear, pack_linear
from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = ["pack_linears", "packed_parameters"]


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


def pack_linears(model: Any) -> None:
    """Replace the linear layers of a loaded model of transformers'; those of classes of their own stay as they are."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(table, "weight", ())
    stay = {head} if tied and type(table) is not nn.Embedding else set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in stay:
                continue
            if type(child) is nn.Linear:
                setattr(parent, name, _packed(child, child.weight.data))
            elif type(child) is Conv1D:
                setattr(parent, name, _packed(child, child.weight.data.t().contiguous()))
    packed_head = model.get_output_embeddings()
    if tied and isinstance(packed_head, PackedLinear):
        model.set_input_embeddings(PackedEmbedding(packed_head.packed))


def packed_parameters(model: nn.Module) -> int:
    """How many parameters were packed."""
    return sum(module.num_parameters for module in model.modules() if isinstance(module, PackedLinear))


def _packed(module: Any, weight_NK: torch.Tensor) -> PackedLinear:
    packed = PackedLinear(weight_NK, None if module.bias is None else module.bias.data)
    module.weight = module.bias = None  # freed before the next is packed, unless the embedding has it too
    return packed
