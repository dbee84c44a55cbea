"""The towers of LLaVA, LLaVA-NeXT, LLaVA-OneVision, Pixtral and Mistral Small 3.1: CLIP
(https://arxiv.org/abs/2103.00020, section 2.4), SigLIP or Pixtral's own, and a projector of two layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from quire_engine.encoders.anyres import shrunken, unpadded
from quire_engine.encoders.towers.layers import LayerNorm, Linear, RMSNorm, features_of
from quire_engine.encoders.towers.pixtral import PixtralModel
from quire_engine.encoders.towers.siglip import Embeddings, SiglipEncoder
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS


class ClipModel(nn.Module):
    """CLIP, which has a row for the class and a norm before the layers; or SigLIP, which has neither."""

    def __init__(self, fields: Fields, layers: Sequence[int]) -> None:
        super().__init__()
        is_clip = fields.values["model_type"] == "clip_vision_model"
        self.embeddings, self.encoder = Embeddings(fields, is_clip), SiglipEncoder(fields, max(layers))
        size, eps = fields.integer("hidden_size", 1, MAX_SIZE), fields.positive("layer_norm_eps", 1e-5)
        self.pre_layrnorm = LayerNorm(size, eps) if is_clip else None
        self._layers = layers

    def forward(self, pixel_values: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width] → [images, rows, E of all layers that are taken]"""
        hidden = self.embeddings(pixel_values)
        if self.pre_layrnorm is not None:
            hidden = self.pre_layrnorm(hidden)
        return features_of(self.encoder.layers, hidden, self._layers)


class PatchMerger(nn.Module):
    """Joins squares of states into one of the same size."""

    def __init__(self, size: int, merge_size: int) -> None:
        super().__init__()
        self.merging_layer = Linear(size * merge_size**2, size, bias=False)
        self._merge_size = merge_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, columns, E] → [n, E]"""
        merge = self._merge_size
        squares = F.unfold(hidden.permute(2, 0, 1)[None], merge, stride=merge)[0].T
        merged: torch.Tensor = self.merging_layer(squares.contiguous())
        return merged


class Projector(nn.Module):
    """Named as in the checkpoint. With a merge size, states are normed and merged first."""

    def __init__(
        self, fields: Fields, size: int, num_layers: int, text_size: int, bias: bool, merge_size: int | None, eps: float
    ) -> None:
        super().__init__()
        activation = ACTIVATIONS[fields.choice("projector_hidden_act", tuple(ACTIVATIONS), "gelu")]
        self.norm = self.patch_merger = None
        if merge_size is not None:
            self.norm, self.patch_merger = RMSNorm(size, eps), PatchMerger(size, merge_size)
        self.linear_1 = Linear(size * num_layers, text_size, bias, activation)
        self.linear_2 = Linear(text_size, text_size, bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, E] → […, E of the text model]; with a merge size, [rows, columns, E] → [n, E of the text model]"""
        if self.norm is not None and self.patch_merger is not None:
            hidden = self.patch_merger(self.norm(hidden))
        projected: torch.Tensor = self.linear_2(self.linear_1(hidden))
        return projected


class LlavaTower(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, layers: Sequence[int], drops_class: bool, projector: Projector) -> None:
        super().__init__()
        kind = PixtralModel if fields.values["model_type"] == "pixtral" else ClipModel
        self.vision_tower, self.multi_modal_projector = kind(fields, layers), projector
        self._drops_class = drops_class

    def forward(self, pixel_values: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width] → [n, E]"""
        hidden = self.vision_tower(pixel_values, **others)
        if self._drops_class:
            hidden = hidden[:, 1:]
        projected: torch.Tensor = self.multi_modal_projector(hidden)
        return projected.reshape(-1, projected.shape[-1])


class TiledTower(nn.Module):
    """A tower that is applied to the whole image and to its tiles; `image_newline` follows each row of the latter. The
    states of many more tiles than `max_tiles` are resized to fewer."""

    def __init__(
        self, tower: nn.Module, points: Sequence[Sequence[int]], tile_size: int, side: int, max_tiles: int | None
    ) -> None:
        super().__init__()
        assert isinstance(tower, LlavaTower)
        self.vision_tower, self.multi_modal_projector = tower.vision_tower, tower.multi_modal_projector
        self.image_newline = nn.Parameter(
            torch.empty(self.multi_modal_projector.linear_2.weight.shape[0]), requires_grad=False
        )
        self._tower, self._points, self._tile_size, self._side = [tower], points, tile_size, side
        self._max_tiles = max_tiles

    def forward(
        self, pixel_values: torch.Tensor, image_sizes: torch.Tensor | None = None, **others: torch.Tensor
    ) -> torch.Tensor:
        """[1, 1 + tiles, channels, height, width] and the image's height and width, [1, 2]; or frames of a video,
        [frames, channels, height, width] → [n, E]"""
        if image_sizes is None:
            return self._video(pixel_values)
        (rows, columns), of_rows, of_columns = unpadded(
            image_sizes[0].tolist(), self._points, self._tile_size, self._side
        )
        states = self._tower[0](pixel_values[0, : 1 + rows * columns])
        states = states.view(1 + rows * columns, -1, states.shape[-1])
        side = self._side
        tiles = states[1:].view(rows, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        tiles = tiles[of_rows, of_columns]
        if self._max_tiles is not None:
            size = shrunken(tiles.shape[0], tiles.shape[1], self._max_tiles, side)
            if size != tiles.shape[:2]:
                tiles = F.interpolate(tiles.permute(2, 0, 1)[None], size, mode="bilinear")[0].permute(1, 2, 0)
        lines = torch.cat((tiles, self.image_newline.expand(len(tiles), 1, -1)), 1)
        return torch.cat((states[0], lines.flatten(0, 1)))

    def _video(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The states of each frame, resized to a fourth as many; `image_newline` follows the last."""
        states = self._tower[0](pixel_values)
        frames = states.view(len(pixel_values), self._side, self._side, -1).permute(0, 3, 1, 2)
        size = ((self._side + 1) // 2,) * 2
        resized = F.interpolate(frames, size, mode="bilinear").permute(0, 2, 3, 1)
        return torch.cat((resized.reshape(-1, states.shape[-1]), self.image_newline[None]))
