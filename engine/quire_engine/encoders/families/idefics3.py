"""Idefics3 (https://arxiv.org/abs/2408.12637, section 3.1) and SmolVLM (https://arxiv.org/abs/2504.05299): a large
image is cut into tiles, and each tile and the whole image, made smaller, are images to a SigLIP tower; their states are
shuffled into fewer that are longer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire_engine.encoders.families.base import ImageFamily
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from torch import nn

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(ImageFamily):
    """See `ImageFamily`."""

    processor = "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil"
    arguments: Mapping[str, Any] = {"return_row_col_info": True}

    def __init__(self, fields: Fields) -> None:
        self.placeholder_id = self.image_token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, 128257)
        self._fields, vision = fields, fields.inner("vision_config")
        self._factor = fields.integer("scale_factor", 1, MAX_SIZE, 2)
        side = vision.integer("image_size", 1, MAX_SIZE, 224) // vision.integer("patch_size", 1, MAX_SIZE, 32)
        if side % self._factor:
            raise fields.error("scale_factor", f"a divisor of the {side} patches of a row")
        self._num_states = (side // self._factor) ** 2

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Rows and columns of tiles; 0 for an image that is not cut."""
        return [int(arrays["rows"].item()), int(arrays["cols"].item())]

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """A line for each row of tiles, then the whole image."""
        rows, columns = layout
        states = image_token * self._num_states
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{states}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return f"{''.join(lines)}{chr(10) if rows else ''}{AROUND}{WHOLE}{states}{AROUND}"

    def tower(self) -> "nn.Module":
        """SigLIP and the projection of shuffled states."""
        from quire_engine.encoders.towers.idefics3 import Idefics3Tower

        hidden_size = self._fields.text().integer("hidden_size", 1, MAX_SIZE)
        return Idefics3Tower(self._fields.inner("vision_config"), self._factor, hidden_size)

    def rename(self, name: str) -> str | None:
        """All but the text model."""
        name = name.removeprefix("model.")
        return name if name.startswith(("vision_model.", "connector.")) else None


class SmolVLM(Idefics3):
    """The same with another image processor."""

    processor = "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil"
