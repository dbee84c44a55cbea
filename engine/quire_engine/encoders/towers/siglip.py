"""SigLIP's tower (https://arxiv.org/abs/2303.15343): a vision transformer (https://arxiv.org/abs/2010.11929) with norms
before attention and feed-forward, and without a class token."""

import torch
import torch.nn.functional as F
from torch import nn

from quire_engine.encoders.towers.layers import MLP, QKV, QUICK_GELU, LayerNorm, Linear, attend
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
        self.qkv_proj = Linear(size, 3 * size, merges=QKV)
        self.out_proj = Linear(size, size)
        self._num_heads = num_heads

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[images, rows, E] → [images, rows, E]"""
        queries, keys, values = self.qkv_proj(hidden).view(*hidden.shape[:2], 3, self._num_heads, -1).unbind(2)
        projected: torch.Tensor = self.out_proj(attend(queries, keys, values, mask))
        return projected


class SiglipLayer(nn.Module):
    """Attention and feed-forward on a residual stream."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size, eps = fields.integer("hidden_size", 1, MAX_SIZE), fields.positive("layer_norm_eps", 1e-6)
        heads = fields.integer("num_attention_heads", 1, size)
        if size % heads:
            raise fields.error("num_attention_heads", f"a divisor of hidden_size={size}")
        activation = fields.choice("hidden_act", (*ACTIVATIONS, QUICK_GELU), "gelu_pytorch_tanh")
        activation = ACTIVATIONS.get(activation, activation)
        self.layer_norm1, self.layer_norm2 = LayerNorm(size, eps), LayerNorm(size, eps)
        self.self_attn = SiglipAttention(size, heads)
        self.mlp = MLP(size, fields.integer("intermediate_size", 1, MAX_SIZE), activation)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[images, rows, E] → [images, rows, E]"""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), mask)
        result: torch.Tensor = hidden + self.mlp(self.layer_norm2(hidden))
        return result


class SiglipEncoder(nn.Module):
    """The layers, or the first of them."""

    def __init__(self, fields: Fields, num_layers: int | None = None) -> None:
        super().__init__()
        number = fields.integer("num_hidden_layers", 1, MAX_LAYERS, 12) if num_layers is None else num_layers
        self.layers = nn.ModuleList(SiglipLayer(fields) for _ in range(number))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """[images, rows, E] → the same"""
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


class Embeddings(nn.Module):
    """Patches with learned positions, of images of one size."""

    def __init__(self, fields: Fields, has_class: bool = False) -> None:
        super().__init__()
        size = fields.integer("hidden_size", 1, MAX_SIZE)
        self.patch_embedding = Patches(fields, bias=not has_class)
        self.image_size = fields.integer("image_size", 1, MAX_SIZE, 224)
        number = (self.image_size // self.patch_embedding.size) ** 2 + has_class
        self.position_embedding = nn.Embedding(number, size)
        self.class_embedding = nn.Parameter(torch.empty(size), requires_grad=False) if has_class else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width] → [images, rows, E]; a row of the class comes first, if there is one."""
        if pixels.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"the image processor makes {pixels.shape[-1]} by {pixels.shape[-2]} pixels; the model takes "
                f"image_size={self.image_size}"
            )
        hidden = self.patch_embedding(pixels).flatten(1, 2)
        if self.class_embedding is not None:
            hidden = torch.cat((self.class_embedding.expand(len(hidden), 1, -1), hidden), 1)
        found: torch.Tensor = hidden + self.position_embedding.weight
        return found


class SiglipModel(nn.Module):
    """SigLIP without the head that pools."""

    def __init__(self, fields: Fields, embeddings: nn.Module | None = None) -> None:
        super().__init__()
        self.embeddings, self.encoder = embeddings or Embeddings(fields), SiglipEncoder(fields)
        size = fields.integer("hidden_size", 1, MAX_SIZE)
        self.post_layernorm = LayerNorm(size, fields.positive("layer_norm_eps", 1e-6))

    def forward(self, pixels: torch.Tensor, *is_patch: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width], and for embeddings of images of any size [images, rows, columns], whether
        a patch is of the image → [images, rows, E]"""
        mask = is_patch[0].flatten(1) if is_patch and not is_patch[0].all() else None
        hidden: torch.Tensor = self.post_layernorm(self.encoder(self.embeddings(pixels, *is_patch), mask))
        return hidden
