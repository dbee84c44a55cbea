"""Pixtral's tower (https://arxiv.org/abs/2410.07073, section 2.1): patches of an image of any size, whose rows and
columns rotate queries and keys; root mean square norms and gated feed-forward."""

from collections.abc import Sequence

import torch
from torch import nn

from quire_engine.encoders.towers.layers import QKV, GatedMLP, Linear, RMSNorm, attend, features_of
from quire_engine.encoders.towers.siglip import Patches
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS

EPS = 1e-5


class PixtralAttention(nn.Module):
    """Attention without biases."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Linear(size, 3 * size, bias=False, merges=QKV), Linear(size, size, bias=False)
        self._num_heads = num_heads

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[1, rows, E] and [rows, 1, D] → [1, rows, E]"""
        queries, keys, values = self.qkv_proj(hidden).view(*hidden.shape[:2], 3, self._num_heads, -1).unbind(2)
        queries, keys = (states * cos + _rotate_half(states) * sin for states in (queries, keys))
        projected: torch.Tensor = self.o_proj(attend(queries, keys, values))
        return projected


def _rotate_half(states: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    return torch.cat((-second, first), -1)


class PixtralLayer(nn.Module):
    """Attention and feed-forward on a residual stream."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size = fields.integer("hidden_size", 1, MAX_SIZE)
        heads = fields.integer("num_attention_heads", 1, size)
        if size % (4 * heads):
            raise fields.error("num_attention_heads", f"a divisor of a fourth of hidden_size={size}")
        activation = ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu")]
        self.attention_norm, self.ffn_norm = RMSNorm(size, EPS), RMSNorm(size, EPS)
        self.attention = PixtralAttention(size, heads)
        inner = fields.integer("intermediate_size", 1, MAX_SIZE)
        self.feed_forward = GatedMLP(size, inner, activation, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[1, rows, E] → the same"""
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
        found: torch.Tensor = hidden + self.feed_forward(self.ffn_norm(hidden)[0])
        return found


class PixtralLayers(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PixtralLayer(fields) for _ in range(number))


class PixtralModel(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, layers: Sequence[int]) -> None:
        super().__init__()
        size = fields.integer("hidden_size", 1, MAX_SIZE)
        self.patch_conv, self.ln_pre = Patches(fields, bias=False), RMSNorm(size, EPS)
        self.transformer = PixtralLayers(fields, max(layers))
        self._layers, self._head_size = layers, size // fields.integer("num_attention_heads", 1, size)
        rope = fields.inner("rope_parameters")
        self._theta = rope.positive("rope_theta", fields.positive("rope_theta", 10000.0))

    def forward(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """[1, channels, height, width] and the image's height and width, [1, 2] → [rows, columns, E]"""
        height, width = (size // self.patch_conv.size for size in image_sizes[0].tolist())
        patches = self.patch_conv(pixel_values)[:, :height, :width].contiguous()
        exponents = torch.arange(0, self._head_size, 2, dtype=torch.float32) / self._head_size
        frequencies = 1.0 / self._theta**exponents
        of_rows = torch.arange(height)[:, None, None] * frequencies[0::2]
        of_columns = torch.arange(width)[None, :, None] * frequencies[1::2]
        shape = (height, width, -1)
        angles = (
            torch.cat((of_rows.expand(shape), of_columns.expand(shape)), -1).repeat(1, 1, 2).view(height * width, 1, -1)
        )
        hidden = self.ln_pre(patches.flatten(1, 2))
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        found = features_of(self.transformer.layers, hidden, self._layers, cos, sin)
        return found.view(height, width, found.shape[-1])
