"""The tower of Gemma 4 (https://huggingface.co/docs/transformers/model_doc/gemma4): patches of an image of any size,
whose columns and rows rotate halves of queries and keys; a pool over squares of patches, and a projection."""

import torch
from quire_kernels import activate_and_mul
from torch import nn

from quire_engine.encoders.towers.layers import Linear, RMSNorm, attend
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS


class ClippedLinear(nn.Module):
    """A linear layer whose inputs and outputs may be clipped to bounds of the checkpoint."""

    def __init__(self, in_features: int, out_features: int, is_clipped: bool) -> None:
        super().__init__()
        self.linear, self._is_clipped = Linear(in_features, out_features, bias=False), is_clipped
        if is_clipped:
            self.input_min, self.input_max, self.output_min, self.output_max = (
                nn.Parameter(torch.empty(()), requires_grad=False) for _ in range(4)
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, K] → [n, N]"""
        if self._is_clipped:
            hidden = hidden.clamp(self.input_min, self.input_max)
        found: torch.Tensor = self.linear(hidden)
        return found.clamp(self.output_min, self.output_max) if self._is_clipped else found


class Attention(nn.Module):
    """Attention with normed heads."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size, eps = fields.integer("hidden_size", 1, MAX_SIZE, 768), fields.positive("rms_norm_eps", 1e-6)
        self._num_heads = fields.integer("num_attention_heads", 1, MAX_SIZE, 12)
        if fields.integer("num_key_value_heads", 1, MAX_SIZE, 12) != self._num_heads:
            raise fields.error("num_key_value_heads", f"num_attention_heads={self._num_heads}")
        head_size = fields.integer("head_dim", 4, MAX_SIZE, 64)
        is_clipped = fields.boolean("use_clipped_linears", False)
        inner = self._num_heads * head_size
        self.q_proj, self.k_proj, self.v_proj = (ClippedLinear(size, inner, is_clipped) for _ in range(3))
        self.o_proj = ClippedLinear(inner, size, is_clipped)
        self.q_norm, self.k_norm, self._eps = RMSNorm(head_size, eps), RMSNorm(head_size, eps), eps

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, E] and [n, 1, D] → [n, E]"""
        shape = (len(hidden), self._num_heads, -1)
        queries, keys, values = (part(hidden).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys = (
            _rotated(norm(states), cos, sin) for norm, states in ((self.q_norm, queries), (self.k_norm, keys))
        )
        projected: torch.Tensor = self.o_proj(
            attend(queries[None], keys[None], _unit(values, self._eps)[None], scale=1.0)[0]
        )
        return projected


def _unit(states: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation without a weight."""
    exact = states.float()
    return (exact * (exact.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(states.dtype)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each half of the features, of which pairs lie half of that apart."""
    first, second, third, fourth = states.chunk(4, -1)
    return states * cos + torch.cat((-second, first, -fourth, third), -1) * sin


class GatedMLP(nn.Module):
    """A gated feed-forward of layers that may be clipped, each with bounds of its own."""

    def __init__(self, size: int, inner_size: int, activation: str, is_clipped: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (ClippedLinear(size, inner_size, is_clipped) for _ in range(2))
        self.down_proj = ClippedLinear(inner_size, size, is_clipped)
        self._activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, E] → [n, E]"""
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        found: torch.Tensor = self.down_proj(activate_and_mul(gate, self._activation, up))
        return found


class Layer(nn.Module):
    """Attention and feed-forward on a residual stream, with norms before and after each."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size, eps = fields.integer("hidden_size", 1, MAX_SIZE, 768), fields.positive("rms_norm_eps", 1e-6)
        activation = ACTIVATIONS[fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")]
        inner = fields.integer("intermediate_size", 1, MAX_SIZE, 3072)
        is_clipped = fields.boolean("use_clipped_linears", False)
        self.self_attn, self.mlp = Attention(fields), GatedMLP(size, inner, activation, is_clipped)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, E] → [n, E]"""
        hidden = hidden + self.post_attention_layernorm(self.self_attn(self.input_layernorm(hidden), cos, sin))
        found: torch.Tensor = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        return found


class PatchEmbedder(nn.Module):
    """Patches with a learned position of their column and one of their row."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size = fields.integer("hidden_size", 1, MAX_SIZE, 768)
        number = fields.integer("position_embedding_size", 1, MAX_SIZE, 10240)
        self.input_proj = Linear(3 * fields.integer("patch_size", 1, 1024, 16) ** 2, size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, number, size), requires_grad=False)

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, pixels of a patch] and [n, 2] → [n, E]"""
        table = self.position_embedding_table
        patches = self.input_proj((2 * (pixels - 0.5)).to(table.dtype))
        found: torch.Tensor = patches + (table[0][positions[:, 0]] + table[1][positions[:, 1]])
        return found


class Encoder(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(fields) for _ in range(fields.integer("num_hidden_layers", 1, MAX_LAYERS, 16))
        )


class VisionModel(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size = fields.integer("hidden_size", 1, MAX_SIZE, 768)
        self.patch_embedder, self.encoder = PatchEmbedder(fields), Encoder(fields)
        self._kernel = fields.integer("pooling_kernel_size", 1, 64, 3)
        self._head_size = fields.integer("head_dim", 4, MAX_SIZE, 64)
        rope = fields.inner("rope_parameters")
        self._theta = rope.positive("rope_theta", 100.0)
        self.std_bias = self.std_scale = None
        if fields.boolean("standardize", False):
            self.std_bias, self.std_scale = (nn.Parameter(torch.empty(size), requires_grad=False) for _ in range(2))

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[patches, pixels of a patch] and columns and rows, [patches, 2] → [n, E]"""
        hidden = self.patch_embedder(pixels, positions)
        half = self._head_size // 2
        frequencies = 1.0 / self._theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
        of_columns, of_rows = (positions[:, None, :, None].float() * frequencies).unbind(2)
        angles = torch.cat((of_columns, of_columns, of_rows, of_rows), -1)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.encoder.layers:
            hidden = layer(hidden, cos, sin)
        columns, rows = (positions.amax(0) + 1).tolist()
        kernel, size = self._kernel, hidden.shape[-1]
        squares = hidden.float().view(rows // kernel, kernel, columns // kernel, kernel, size)
        pooled: torch.Tensor = squares.mean((1, 3)).flatten(0, 1).to(hidden.dtype).float() * size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return pooled.to(hidden.dtype)


class Embedder(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, text_size: int) -> None:
        super().__init__()
        self.embedding_projection = Linear(fields.integer("hidden_size", 1, MAX_SIZE, 768), text_size, bias=False)
        self._eps = fields.positive("rms_norm_eps", 1e-6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, E] → [n, E of the text model]"""
        projected: torch.Tensor = self.embedding_projection(_unit(hidden, self._eps))
        return projected


class Gemma4Tower(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, text_size: int) -> None:
        super().__init__()
        self.vision_tower, self.embed_vision = VisionModel(fields), Embedder(fields, text_size)

    def forward(
        self, pixel_values: torch.Tensor, image_position_ids: torch.Tensor, **others: torch.Tensor
    ) -> torch.Tensor:
        """[frames, patches, pixels of a patch], and [frames, patches, 2], their columns and rows, -1 for padding →
        [n, E]"""
        is_patch = image_position_ids[..., 0] >= 0
        frames = [
            self.vision_tower(pixels[own], positions[own])
            for pixels, positions, own in zip(pixel_values, image_position_ids, is_patch, strict=True)
        ]
        projected: torch.Tensor = self.embed_vision(torch.cat(frames))
        return projected
