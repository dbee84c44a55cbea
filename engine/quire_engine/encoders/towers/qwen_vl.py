"""The towers of Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1) and its successors: a vision transformer whose
patches turn by their row and column, and a merger, which makes one hidden state of each square of patches.

Patches come square by square, and so do hidden states::

    patches   0 1  4 5      squares of 2 by 2      0  1
              2 3  6 7                             2  3
              8 9 12 13
             10 11 14 15
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from quire_engine.encoders.towers.layers import MLP, QUICK_GELU, GatedMLP, LayerNorm, Linear, RMSNorm, attend
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS

EPS = 1e-6
"""Of all norms."""
THETA = 10000.0
"""Of rotary angles."""
Norm = type[RMSNorm] | type[LayerNorm]
Groups = list[torch.Tensor]
"""Rows that see each other, [groups, rows of each] by size."""


class Patches(nn.Module):
    """Projects patches; in the checkpoint, a convolution whose stride is its size."""

    def __init__(self, fields: Fields, size: int, has_bias: bool, default_patch_size: int) -> None:
        super().__init__()
        patch = fields.integer("patch_size", 1, MAX_SIZE, default_patch_size)
        frames = fields.integer("temporal_patch_size", 1, MAX_SIZE, 2)
        channels = fields.integer("in_channels", 1, 64, 3)
        self.proj = nn.Module()
        self.proj.weight = nn.Parameter(torch.empty(size, channels, frames, patch, patch), requires_grad=False)
        if has_bias:
            self.proj.bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """[patches, channels · frames · size · size] → [patches, E]"""
        weight = self.proj.get_parameter("weight")
        return F.linear(pixels.to(weight.dtype), weight.flatten(1), getattr(self.proj, "bias", None))


class Attention(nn.Module):
    """Attention of patches that turn by their row and column."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = Linear(size, 3 * size), Linear(size, size)
        self._num_heads = num_heads

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[patches, E] → [patches, E]; cos and sin are [patches, 1, D]."""
        queries, keys, values = self.qkv(hidden).view(len(hidden), 3, self._num_heads, -1).unbind(1)
        queries, keys = (
            (x.float() * cos + torch.cat((-x.float().chunk(2, -1)[1], x.float().chunk(2, -1)[0]), -1) * sin).to(x.dtype)
            for x in (queries, keys)
        )
        out = torch.empty_like(hidden)
        for rows in groups:
            found = attend(queries[rows], keys[rows], values[rows])
            out[rows.flatten()] = found.flatten(0, 1)
        projected: torch.Tensor = self.proj(out)
        return projected


class Block(nn.Module):
    """Attention and feed-forward on a residual stream."""

    def __init__(self, size: int, num_heads: int, mlp: nn.Module, norm: Norm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(size, EPS), norm(size, EPS)
        self.attn, self.mlp = Attention(size, num_heads), mlp

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: Groups) -> torch.Tensor:
        """[patches, E] → [patches, E]"""
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin, groups)
        result: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return result


class Merger(MLP):
    """Joins the patches of each square, and projects them to the text model's size."""

    def __init__(self, size: int, num_joined: int, out_size: int, norm: Norm, is_late: bool = False) -> None:
        inner = size * num_joined
        super().__init__(inner, inner, "gelu", out_size)
        self.norm = norm(inner if is_late else size, EPS)
        """Of joined patches if `is_late`, else of single ones."""
        self._inner, self._is_late = inner, is_late

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[patches, E] → [squares, E of the text model]"""
        normed = self.norm(hidden.view(-1, self._inner) if self._is_late else hidden).view(-1, self._inner)
        return super().forward(normed)


class QwenTower(nn.Module):
    """Named as in Qwen3-VL's checkpoints, but for `linear_fc`.

    Args:
        fields: of `vision_config`.
        size: of patches' states.
        text_size: of the text model's.
        mlps: the feed-forward of each layer.
        norm: the kind of all norms.
        has_patch_bias: whether the projection of patches has a bias.
        patch_size: the default.
        window_size: of layers that have one, in pixels.
        whole: the layers in which each patch sees the whole frame; None: all.
        num_positions: of learned positions, a square number; 0: there are none.
        tapped: the layers whose states have mergers of their own.
    """

    def __init__(
        self, fields: Fields, size: int, text_size: int, mlps: Sequence[nn.Module], norm: Norm, *,
        has_patch_bias: bool, patch_size: int, window_size: int = 0, whole: Sequence[int] | None = None,
        num_positions: int = 0, tapped: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        heads = fields.integer("num_heads", 1, size, 16)
        if size % (4 * heads):
            raise fields.error("num_heads", f"a divisor of {size / 4}, a quarter of the size of states")
        self._merge = fields.integer("spatial_merge_size", 1, MAX_SIZE, 2)
        patch = fields.integer("patch_size", 1, MAX_SIZE, patch_size)
        self.patch_embed = Patches(fields, size, has_patch_bias, patch_size)
        self.blocks = nn.ModuleList(Block(size, heads, mlp, norm) for mlp in mlps)
        self.merger = Merger(size, self._merge**2, text_size, norm)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(size, self._merge**2, text_size, norm, is_late=True) for _ in tapped
        )
        self._side = round(num_positions**0.5)
        if self._side:
            self.pos_embed = nn.Embedding(self._side**2, size)
        self._pair_size, self._tapped = size // heads // 2, list(tapped)
        self._window = window_size // self._merge // patch
        self._whole = set(range(len(mlps)) if whole is None else whole)

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        """[patches, pixels] and [1, 3], frames, rows and columns → [n, (1 + tapped layers) · E]"""
        frames, rows, columns = image_grid_thw[0].tolist()
        merge = self._merge
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        places = places.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3).reshape(2, -1)
        hidden = self.patch_embed(pixel_values)
        if self._side:
            hidden = hidden + self._positions(places, (rows, columns)).to(hidden.dtype).repeat(frames, 1)
        pairs = torch.arange(0, self._pair_size, 2, dtype=torch.float32) / self._pair_size
        angles = (places[..., None] * (1.0 / THETA**pairs)).transpose(0, 1).flatten(1).repeat(frames, 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        whole = [torch.arange(frames * rows * columns).view(frames, -1)]
        windows = self._windows(places, whole[0]) if self._window else whole
        features = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, cos, sin, whole if number in self._whole else windows)
            if number in self._tapped:
                features.append(self.deepstack_merger_list[self._tapped.index(number)](hidden))
        return torch.cat((self.merger(hidden), *features), 1)

    def _windows(self, places: torch.Tensor, frames: torch.Tensor) -> Groups:
        """Patches of the same window of the same frame; windows at the right and at the bottom may be smaller."""
        cells = places // (self._merge * self._window)
        _, window, counts = torch.unique(
            cells[0] * (int(cells[1].max()) + 1) + cells[1], return_inverse=True, return_counts=True
        )
        ordered = window.argsort(stable=True).split(counts.tolist())
        sizes = sorted({len(own) for own in ordered})
        return [frames[:, torch.stack([own for own in ordered if len(own) == size])].flatten(0, 1) for size in sizes]

    def _positions(self, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """[patches, E], learned positions of the whole image, interpolated between the nearest four; its corners are
        those of the table."""
        axes = []
        for place, size in zip(places, shape, strict=True):
            where = place.float() * (self._side - 1) / max(size - 1, 1)
            low = where.floor()
            near = low.long()
            fraction = where - low
            axes.append(((near, 1 - fraction), ((near + 1).clamp(max=self._side - 1), fraction)))
        parts: list[torch.Tensor] = [
            self.pos_embed(row * self._side + column) * (row_weight * column_weight)[:, None]
            for row, row_weight in axes[0]
            for column, column_weight in axes[1]
        ]
        return sum(parts[1:], parts[0])


def _depth(fields: Fields, default: int) -> int:
    return fields.integer("depth", 1, MAX_LAYERS, default)


def qwen2_vl(fields: Fields, text_size: int) -> QwenTower:
    """Of Qwen2-VL; fields are those of `vision_config`."""
    size = fields.integer("embed_dim", 1, MAX_SIZE, 1280)
    inner = int(size * fields.positive("mlp_ratio", 4.0))
    activation = fields.choice("hidden_act", (QUICK_GELU, *ACTIVATIONS), QUICK_GELU)
    activation = ACTIVATIONS.get(activation, activation)
    mlps = [MLP(size, inner, activation) for _ in range(_depth(fields, 32))]
    return QwenTower(fields, size, text_size, mlps, LayerNorm, has_patch_bias=False, patch_size=14)


def qwen2_5_vl(fields: Fields, text_size: int) -> QwenTower:
    """Of Qwen2.5-VL."""
    size = fields.integer("hidden_size", 1, MAX_SIZE, 3584)
    inner = fields.integer("intermediate_size", 1, MAX_SIZE, 3420)
    activation = ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "silu")]
    mlps = [GatedMLP(size, inner, activation) for _ in range(_depth(fields, 32))]
    return QwenTower(
        fields, size, text_size, mlps, RMSNorm, has_patch_bias=False, patch_size=14,
        window_size=fields.integer("window_size", 1, MAX_SIZE, 112),
        whole=_layers(fields, "fullatt_block_indexes", [7, 15, 23, 31], len(mlps)),
    )  # fmt: skip


def qwen3_vl(fields: Fields, text_size: int) -> QwenTower:
    """Of Qwen3-VL and Qwen3.5."""
    size = fields.integer("hidden_size", 1, MAX_SIZE, 1152)
    inner = fields.integer("intermediate_size", 1, MAX_SIZE, 4304)
    activation = ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")]
    mlps = [MLP(size, inner, activation) for _ in range(_depth(fields, 27))]
    return QwenTower(
        fields, size, text_size, mlps, LayerNorm, has_patch_bias=True, patch_size=16,
        num_positions=fields.integer("num_position_embeddings", 1, MAX_SIZE, 2304),
        tapped=_layers(fields, "deepstack_visual_indexes", [], len(mlps)),
    )  # fmt: skip


def _layers(fields: Fields, name: str, default: list[int], number: int) -> list[int]:
    found = fields.values.get(name, default)
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one < number for one in found):
        raise fields.error(name, f"a list of layers' numbers below {number}")
    return found
