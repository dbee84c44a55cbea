"""Layers of towers: linear layers and norms in our kernels, and attention in which each patch sees all."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from quire_kernels import LinearWeight, layer_norm, linear, rms_norm
from torch import nn

from quire_engine.models.linear import LinearMethod, LoadedLinear

QKV = ("q_proj", "k_proj", "v_proj")
"""What the projections of attention are called, which are computed as one."""
QUICK_GELU = "quick_gelu"
"""x · sigmoid(1.702 x), CLIP's activation (https://github.com/openai/CLIP)."""


class Linear(nn.Module):
    """`activation(x · Wᵀ + bias)`; without an activation where it is empty.

    Args:
        in_features, out_features: numbers of features.
        bias: whether there is one.
        activation: of the result, or of its first half if it is gated.
        merges: the layers of the checkpoint that are computed as one; each has an equal part of the output features.
        is_gated: the result is half as long, `activation(first half) * second half`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activation: str = "",
        merges: Sequence[str] = (), is_gated: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.merges, self._is_gated = tuple(merges), is_gated
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._activation = activation
        self._packed: LinearWeight | None = None

    def pack(self, method: LinearMethod) -> None:
        """Convert the weight, which is freed."""
        weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        self._packed = method.pack(
            LoadedLinear(
                tensors={"weight": weight}, sizes=[len(weight)], bias=bias, dtype=weight.dtype, activation_bits=8,
                gated=self._is_gated, activation=self._activation or "silu",
                activates=bool(self._activation) and not self._is_gated, asymmetric=True,
            )
        )  # fmt: skip
        self.weight.data = weight.new_empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, K] → […, N], or half of it if it is gated"""
        assert self._packed is not None
        result = linear(hidden.reshape(-1, hidden.shape[-1]), self._packed)
        return result.view(*hidden.shape[:-1], -1)


class LayerNorm(nn.Module):
    """Layer normalisation, with statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, E]"""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return layer_norm(rows, self.weight, self.bias, self._eps).view(hidden.shape)


class RMSNorm(nn.Module):
    """Root mean square normalisation; `offset` is added to its weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self._eps, self._offset = eps, offset

    def pack(self) -> None:
        """Make the weight what rows are multiplied by."""
        self.weight.add_(self._offset)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, E]"""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return rms_norm(rows, self.weight, self._eps).view(hidden.shape)


class MLP(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, size: int, inner_size: int, activation: str, out_size: int | None = None) -> None:
        super().__init__()
        self._is_quick = activation == QUICK_GELU
        self.fc1 = Linear(size, inner_size, activation="" if self._is_quick else activation)
        self.fc2 = Linear(inner_size, out_size or size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, out_size]"""
        inner = self.fc1(hidden)
        found: torch.Tensor = self.fc2(inner * torch.sigmoid(1.702 * inner) if self._is_quick else inner)
        return found


class GatedMLP(nn.Module):
    """A gated feed-forward."""

    def __init__(self, size: int, inner_size: int, activation: str, bias: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = Linear(size, 2 * inner_size, bias, activation, ("gate_proj", "up_proj"), is_gated=True)
        self.down_proj = Linear(inner_size, size, bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, E] → [n, E]"""
        found: torch.Tensor = self.down_proj(self.gate_up_proj(hidden))
        return found


def features_of(
    layers: Iterable[nn.Module], hidden: torch.Tensor, wanted: Sequence[int], *others: torch.Tensor
) -> torch.Tensor:
    """States after so many layers as `wanted` says, [images, rows, E]; of several, joined. `others` are the layers' own
    arguments."""
    found = {0: hidden}
    for number, layer in enumerate(layers, 1):
        found[number] = hidden = layer(hidden, *others)
    return torch.cat([found[number] for number in wanted], -1)


def shuffle(hidden: torch.Tensor, factor: int) -> torch.Tensor:
    """Squares of states, joined into one that is longer; [images, patches, E] → [images, patches / factor², factor² ·
    E]."""
    images, patches, size = hidden.shape
    side = round(patches**0.5) // factor
    squares = hidden.reshape(images, side, factor, side, factor, size).transpose(2, 3)
    return squares.reshape(images, side**2, factor**2 * size)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each row to all of its image; [images, rows, H, D] → [images, rows, H · D].

    Args:
        queries, keys, values: of one shape.
        mask: which rows are seen, [images, rows] or [images, rows, rows]; None: all.
        scale: of the products; None: the inverse of the root of D.
    """
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask[:, None]
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return found.transpose(1, 2).flatten(2)
