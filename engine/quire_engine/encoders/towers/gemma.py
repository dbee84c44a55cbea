"""The tower of Gemma 3: SigLIP, a pool over squares of patches, a norm and a projection."""

import torch
import torch.nn.functional as F
from torch import nn

from quire_engine.encoders.towers.layers import RMSNorm
from quire_engine.encoders.towers.siglip import SiglipModel
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields


class Gemma3Projector(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, kernel: int, text_size: int) -> None:
        super().__init__()
        size = fields.integer("hidden_size", 1, MAX_SIZE)
        self.mm_input_projection_weight = nn.Parameter(torch.empty(size, text_size), requires_grad=False)
        self.mm_soft_emb_norm = RMSNorm(size, fields.positive("layer_norm_eps", 1e-6), offset=1.0)
        self._kernel = kernel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, columns, E] → [n, E of the text model]"""
        pooled = F.avg_pool2d(hidden.permute(2, 0, 1), self._kernel).flatten(1).T.contiguous()
        projected: torch.Tensor = self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight
        return projected


class Gemma3Tower(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, kernel: int, text_size: int) -> None:
        super().__init__()
        self.vision_tower = SiglipModel(fields)
        self.multi_modal_projector = Gemma3Projector(fields, kernel, text_size)

    def forward(self, pixel_values: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        """[1, channels, height, width] → [n, E]"""
        (hidden,) = self.vision_tower(pixel_values)
        side = round(len(hidden) ** 0.5)
        projected: torch.Tensor = self.multi_modal_projector(hidden.view(side, side, -1))
        return projected
