"""SigLIP's tower (https://arxiv.org/abs/2303.15343): a vision transformer (https://arxiv.org/abs/2010.11929) with norms
before attention and feed-forward, and without a class token."""

import torch
import torch.nn.functional as F
from torch import nn

from quire_engine.encoders.towers.layers import LayerNorm, Linear, attend
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS


class Patches(nn.Module):
    """Projects patches of pixels; in the checkpoint, a convolution whose stride is its size."""

    def __init__(self, fields: Fields, bias: bool = True) -> None:
        super().__init__()
        self.size = fields.integer("patch_size", 1, MAX_SIZE, 16)
        channels, width = fields.integer("num_channels", 1, 64, 3), fields.integer("hidden_size", 1, MAX_SIZE)
        self.weight = nn.Parameter(torch.empty(width, channels, self.size, self.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width] → [images, rows, columns, E]"""
        found = F.conv2d(pixels.to(self.weight.dtype), self.weight, self.bias, stride=self.size)
        return found.permute(0, 2, 3, 1)


class SiglipAttention(nn.Module):
    """Attention with biases."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (Linear(size, size) for _ in range(3))
        self.out_proj = Linear(size, size)
        self._num_heads = num_heads

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[images, rows, E] → [images, rows, E]"""
        shape = (*hidden.shape[:2], self._num_heads, -1)
        queries, keys, values = (part(hidden).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
        projected: torch.Tensor = self.out_proj(attend(queries, keys, values, mask))
        return projected


class SiglipMLP(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, size: int, inner_size: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(size, inner_size, activation=activation), Linear(inner_size, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, E]"""
        found: torch.Tensor = self.fc2(self.fc1(hidden))
        return found


class SiglipLayer(nn.Module):
    """Attention and feed-forward on a residual stream."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size, eps = fields.integer("hidden_size", 1, MAX_SIZE), fields.positive("layer_norm_eps", 1e-6)
        heads = fields.integer("num_attention_heads", 1, size)
        if size % heads:
            raise fields.error("num_attention_heads", f"a divisor of hidden_size={size}")
        activation = ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")]
        self.layer_norm1, self.layer_norm2 = LayerNorm(size, eps), LayerNorm(size, eps)
        self.self_attn = SiglipAttention(size, heads)
        self.mlp = SiglipMLP(size, fields.integer("intermediate_size", 1, MAX_SIZE), activation)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[images, rows, E] → [images, rows, E]"""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), mask)
        result: torch.Tensor = hidden + self.mlp(self.layer_norm2(hidden))
        return result


class SiglipEncoder(nn.Module):
    """The layers."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        number = fields.integer("num_hidden_layers", 1, MAX_LAYERS, 12)
        self.layers = nn.ModuleList(SiglipLayer(fields) for _ in range(number))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None, last: int | None = None) -> torch.Tensor:
        """[images, rows, E] → the same after all layers, or after the first `last` ones."""
        for layer in list(self.layers)[:last]:
            hidden = layer(hidden, mask)
        return hidden
