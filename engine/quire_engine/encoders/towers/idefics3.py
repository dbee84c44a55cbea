"""The tower of Idefics3 and SmolVLM: SigLIP for images of any size, and a projection of shuffled states."""

import torch
from torch import nn

from quire_engine.encoders.towers.layers import Linear, shuffle
from quire_engine.encoders.towers.siglip import Patches, SiglipModel
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields


class Embeddings(nn.Module):
    """Patches with learned positions: those of the fraction of the image where a patch begins, whatever its size
    (https://arxiv.org/abs/2307.06304, section 2.1)."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.patch_embedding = Patches(fields)
        self._side = fields.integer("image_size", 1, MAX_SIZE, 224) // self.patch_embedding.size
        self.position_embedding = nn.Embedding(self._side**2, fields.integer("hidden_size", 1, MAX_SIZE))

    def forward(self, pixels: torch.Tensor, is_patch: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width] and [images, rows, columns], whether a patch is of the image → [images,
        patches, E]"""
        patches = self.patch_embedding(pixels)
        bounds = torch.arange(1 / self._side, 1.0, 1 / self._side)
        places = []
        for axis, number in ((1, is_patch[:, :, 0].sum(1)), (2, is_patch[:, 0].sum(1))):
            start = torch.arange(is_patch.shape[axis], dtype=torch.float32) * (1.0 / number)[:, None]
            places.append(torch.bucketize(start.clamp(max=1.0 - 1e-6), bounds, right=True))
        position = (places[0][:, :, None] * self._side + places[1][:, None]).where(is_patch, 0)
        hidden: torch.Tensor = patches.flatten(1, 2) + self.position_embedding(position.flatten(1))
        return hidden


class Projection(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.proj = Linear(in_features, out_features, bias=False)


class Connector(nn.Module):
    """Joins squares of states into one that is longer, and projects it to the text model's size."""

    def __init__(self, size: int, factor: int, text_size: int) -> None:
        super().__init__()
        self.modality_projection = Projection(size * factor**2, text_size)
        self._factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[images, patches, E] → [images, patches / factor², E of the text model]"""
        projected: torch.Tensor = self.modality_projection.proj(shuffle(hidden, self._factor))
        return projected


class Idefics3Tower(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, fields: Fields, factor: int, text_size: int) -> None:
        super().__init__()
        embeddings = Embeddings(fields)
        self.vision_model, self._size = SiglipModel(fields, embeddings), embeddings.patch_embedding.size
        self.connector = Connector(fields.integer("hidden_size", 1, MAX_SIZE), factor, text_size)

    def forward(
        self, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor, **layout: torch.Tensor
    ) -> torch.Tensor:
        """[1, tiles, channels, height, width] and the mask of the pixels that are the image's → [n, E]"""
        mask = pixel_attention_mask[0].unfold(1, self._size, self._size).unfold(2, self._size, self._size)
        hidden: torch.Tensor = self.connector(self.vision_model(pixel_values[0], mask.sum((-1, -2)) > 0))
        return hidden.flatten(0, 1)
