"""Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1) and its successors: images of any size, in about as many
hidden states as they have squares of 28 or 32 pixels."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire_engine.encoders.families.base import ImageFamily
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from torch import nn

NAMES = (
    ("merger.ln_q.", "merger.norm."), ("merger.mlp.0.", "merger.fc1."), ("merger.mlp.2.", "merger.fc2."),
    (".linear_fc", ".fc"),
)  # fmt: skip
"""What modules are called in checkpoints, and in the tower."""


class Qwen2VL(ImageFamily):
    """See `ImageFamily`."""

    processor = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
    default_image_token_id = 151655

    def __init__(self, fields: Fields) -> None:
        token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, self.default_image_token_id)
        self.placeholder_id = self.image_token_id = token_id
        self._folder = fields.path.parent
        self._vision, self._text_size = fields.inner("vision_config"), fields.text().integer("hidden_size", 1, MAX_SIZE)
        self._merge_size = self._vision.integer("spatial_merge_size", 1, MAX_SIZE, 2)

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Frames, and rows and columns of patches."""
        found: list[int] = arrays["image_grid_thw"][0].tolist()
        return found

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """Hidden states alone: the prompt has the tokens around an image."""
        frames, rows, columns = self.grid(layout)
        return image_token * (frames * rows * columns)

    def grid(self, layout: Sequence[int]) -> tuple[int, ...]:
        """Frames, and rows and columns of squares of patches."""
        frames, rows, columns = layout
        return frames, rows // self._merge_size, columns // self._merge_size

    def tower(self) -> "nn.Module":
        """A vision transformer whose patches have rotary positions, and the merger."""
        from quire_engine.encoders.towers.qwen_vl import qwen2_vl

        return qwen2_vl(self._vision, self._text_size)

    def rename(self, name: str) -> str | None:
        """All but the text model."""
        name = name.removeprefix("model.")
        if not name.startswith("visual."):
            return None
        name = name.removeprefix("visual.")
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        return name


class Qwen25VL(Qwen2VL):
    """The same with attention in windows (https://arxiv.org/abs/2502.13923, section 2.1.1)."""

    def tower(self) -> "nn.Module":
        """A vision transformer, and the merger."""
        from quire_engine.encoders.towers.qwen_vl import qwen2_5_vl

        return qwen2_5_vl(self._vision, self._text_size)


class Qwen3VL(Qwen2VL):
    """The same with learned positions, and features of some layers (https://arxiv.org/abs/2511.21631)."""

    def tower(self) -> "nn.Module":
        """A vision transformer, and its mergers."""
        from quire_engine.encoders.towers.qwen_vl import qwen3_vl

        return qwen3_vl(self._vision, self._text_size)


class Qwen35(Qwen3VL):
    """Qwen3.5 and 3.6."""

    default_image_token_id = 248056


class Glm4v(Qwen2VL):
    """GLM-4.1V and GLM-4.5V (https://arxiv.org/abs/2507.01006, section 2.1), whose tower is transformers' own."""

    processor = "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil"
    default_image_token_id = 151343

    def tower(self) -> "nn.Module":
        """The vision part of transformers' model."""
        from quire_engine.encoders.towers.transformers_tower import TransformersTower

        return TransformersTower(self._folder)

    def rename(self, name: str) -> None:
        """None: transformers reads the files."""


class Glm4vMoe(Glm4v):
    """The same with another token for images."""

    default_image_token_id = 151363
