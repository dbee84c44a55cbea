"""The tower of InternVL (https://arxiv.org/abs/2312.14238, section 3.2): a vision transformer with scaled sublayers."""

import torch
from torch import nn

from quire_engine.encoders.towers.layers import MLP, QKV, LayerNorm, Linear, RMSNorm, attend, shuffle
from quire_engine.encoders.towers.siglip import Patches
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS


class PatchEmbeddings(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.projection = Patches(fields)


class Embeddings(nn.Module):
    """A row for the class, and patches, with learned positions."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.patch_embeddings, size = PatchEmbeddings(fields), fields.integer("hidden_size", 1, MAX_SIZE)
        self._side = fields.integer("image_size", 1, MAX_SIZE) // self.patch_embeddings.projection.size
        self.cls_token = nn.Parameter(torch.empty(1, 1, size), requires_grad=False)
        self.position_embeddings = nn.Parameter(torch.empty(1, 1 + self._side**2, size), requires_grad=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[tiles, channels, height, width] → [tiles, 1 + patches, E]"""
        patches = self.patch_embeddings.projection(pixels)
        if patches.shape[1:3] != (self._side, self._side):
            raise ValueError(
                f"a tile has {patches.shape[1]} by {patches.shape[2]} patches; the model takes {self._side}"
            )
        hidden = torch.cat((self.cls_token.expand(len(patches), -1, -1), patches.flatten(1, 2)), 1)
        return hidden + self.position_embeddings


class Attention(nn.Module):
    """Attention; queries and keys may be normed over all heads."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size, bias = fields.integer("hidden_size", 1, MAX_SIZE), fields.boolean("attention_bias", False)
        self._num_heads = fields.integer("num_attention_heads", 1, size)
        if size % self._num_heads:
            raise fields.error("num_attention_heads", f"a divisor of hidden_size={size}")
        self.qkv_proj = Linear(size, 3 * size, bias, merges=QKV)
        self.projection_layer = Linear(size, size)
        has_norms = fields.boolean("use_qk_norm", False)
        self.q_norm, self.k_norm = (RMSNorm(size, 1e-6) if has_norms else nn.Identity() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tiles, rows, E] → the same"""
        shape = (*hidden.shape[:2], self._num_heads, -1)
        queries, keys, values = self.qkv_proj(hidden).chunk(3, -1)
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        projected: torch.Tensor = self.projection_layer(
            attend(queries.reshape(shape), keys.reshape(shape), values.reshape(shape))
        )
        return projected


class Layer(nn.Module):
    """Attention and feed-forward, scaled by feature, on a residual stream."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        size, eps = fields.integer("hidden_size", 1, MAX_SIZE), fields.positive("layer_norm_eps")
        norm = LayerNorm if fields.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm")[0] == "l" else RMSNorm
        self.attention = Attention(fields)
        activation = ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu")]
        self.mlp = MLP(size, fields.integer("intermediate_size", 1, MAX_SIZE), activation)
        self.layernorm_before, self.layernorm_after = norm(size, eps), norm(size, eps)
        self.lambda_1, self.lambda_2 = (nn.Parameter(torch.empty(size), requires_grad=False) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tiles, rows, E] → the same"""
        hidden = hidden + self.lambda_1 * self.attention(self.layernorm_before(hidden))
        found: torch.Tensor = hidden + self.lambda_2 * self.mlp(self.layernorm_after(hidden))
        return found


class Encoder(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(Layer(fields) for _ in range(fields.integer("num_hidden_layers", 1, MAX_LAYERS))))


class VisionModel(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.embeddings, self.encoder = Embeddings(fields), Encoder(fields)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[tiles, channels, height, width] → [tiles, 1 + patches, E]"""
        hidden: torch.Tensor = self.encoder.layer(self.embeddings(pixels))
        return hidden


class Projector(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, size: int, text_size: int) -> None:
        super().__init__()
        activation = ACTIVATIONS[fields.choice("projector_hidden_act", tuple(ACTIVATIONS), "gelu")]
        self.layer_norm = LayerNorm(size, 1e-5)
        self.linear_1 = Linear(size, text_size, activation=activation)
        self.linear_2 = Linear(text_size, text_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, E of the text model]"""
        projected: torch.Tensor = self.linear_2(self.linear_1(self.layer_norm(hidden)))
        return projected


class InternVLTower(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, vision: Fields, factor: int, text_size: int) -> None:
        super().__init__()
        size = vision.integer("hidden_size", 1, MAX_SIZE) * factor**2
        self.vision_tower, self.multi_modal_projector = VisionModel(vision), Projector(fields, size, text_size)
        self._factor = factor

    def forward(self, pixel_values: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """[tiles, channels, height, width] → [n, E]"""
        hidden = self.vision_tower(pixel_values)[:, 1:]
        projected: torch.Tensor = self.multi_modal_projector(shuffle(hidden, self._factor))
        return projected.flatten(0, 1)
