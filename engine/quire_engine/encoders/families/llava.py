"""LLaVA and the families that follow its form: a vision tower, a projector of two layers, and a text model.

- LLaVA 1.5 (https://arxiv.org/abs/2310.03744): CLIP on a square image.
- LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/): the same on the whole image and on its tiles. The
  states of the tiles are put together as in the image, without those of padding, and with a state after each row.
- LLaVA-OneVision (https://arxiv.org/abs/2408.03326): the same with SigLIP, and many states are resized to fewer.
- Pixtral (https://arxiv.org/abs/2410.07073, section 2) and Mistral Small 3.1: an image of any size, with a token after
  each row; the latter merges squares of patches.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_engine.encoders.families.base import Arrays, ExpandedVideo, ImageFamily
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

PROCESSORS = {
    "clip_vision_model": "clip.image_processing_pil_clip.CLIPImageProcessorPil",
    "siglip_vision_model": "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
    "pixtral": "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
}
"""By `model_type` of the vision tower."""
VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
        "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
        "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    },
    "pixtral": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
    },
}  # fmt: skip
"""What published files leave out."""


def rename(name: str) -> str | None:
    """The name of a tensor of a vision tower or projector, in files of any age; None for those of the text model."""
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    return name if name.startswith(("vision_tower.", "multi_modal_projector.", "image_newline")) else None


def read_vision(fields: Fields, types: tuple[str, ...]) -> Fields:
    """`vision_config` with the defaults of its `model_type`."""
    vision = fields.inner("vision_config")
    name = vision.choice("model_type", types, types[0])
    given = {key: value for key, value in vision.values.items() if value is not None}
    return vision.with_values({**VISION_DEFAULTS[name], **given, "model_type": name})


def read_layers(fields: Fields, vision: Fields, default: int) -> tuple[int, ...]:
    """After how many layers of the tower its states are taken: one number, or several whose states are joined."""
    number = vision.integer("num_hidden_layers", 1, MAX_LAYERS)
    value = fields.values.get("vision_feature_layer")
    values = [default] if value is None else value if isinstance(value, list) else [value]
    if not values or not all(type(one) is int and -number - 1 <= one <= number for one in values):
        raise fields.error("vision_feature_layer", f"one or several integers from {-number - 1} to {number}")
    return tuple(one if one >= 0 else number + 1 + one for one in values)


class Llava(ImageFamily):
    """See `ImageFamily`. LLaVA 1.5, and Pixtral with a tower of its own."""

    default_layer, default_bias = -2, True
    towers: tuple[str, ...] = ("clip_vision_model", "siglip_vision_model", "pixtral")

    def __init__(self, fields: Fields) -> None:
        self.fields, self.vision = fields, read_vision(fields, self.towers)
        # transformers 4.50 and later write the second name.
        index = fields.integer("image_token_index", 0, MAX_POSITIONS, 32000)
        self.placeholder_id = self.image_token_id = fields.integer("image_token_id", 0, MAX_POSITIONS, index)
        kind = str(self.vision.values["model_type"])
        self.processor = PROCESSORS[kind]
        self.is_pixtral = kind == "pixtral"
        self.size_names = ("image_sizes",) if self.is_pixtral else ()
        self.layers = read_layers(fields, self.vision, self.default_layer)
        strategy = fields.choice("vision_feature_select_strategy", ("default", "full"), "default")
        self.drops_class = strategy == "default" and not self.is_pixtral
        self.patch_size = self.vision.integer("patch_size", 1, MAX_SIZE)
        self.merge_size = fields.integer("spatial_merge_size", 1, MAX_SIZE, 1)
        self.side = self.vision.integer("image_size", 1, MAX_SIZE) // self.patch_size
        if self.is_pixtral:
            unit = self.patch_size * self.merge_size
            self.arguments = {"patch_size": {"height": unit, "width": unit}}
        self.num_states = self.side**2 + (kind == "clip_vision_model") - self.drops_class
        """Of an image, or a tile, with one size."""

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Rows and columns of the states where an image's size decides; else empty."""
        if not self.is_pixtral:
            return []
        return [int(size) // (self.patch_size * self.merge_size) for size in arrays["image_sizes"][0]]

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """The states, with a token after each row of Pixtral's."""
        if not layout:
            return image_token * self.num_states
        rows, columns = layout
        return "[IMG_BREAK]".join([image_token * columns] * rows) + "[IMG_END]"

    def tower(self) -> "nn.Module":
        """The vision tower and the projector."""
        from quire_engine.encoders.towers.llava import LlavaTower, Projector

        text = self.fields.text()
        text_size = text.integer("hidden_size", 1, MAX_SIZE, 4096)
        vision_size = self.vision.integer("hidden_size", 1, MAX_SIZE)
        bias = self.fields.boolean("multimodal_projector_bias", self.default_bias)
        eps = text.positive("rms_norm_eps", 1e-6)
        merge_size = self.merge_size if "pixtral" in self.towers[:1] else None
        projector = Projector(self.fields, vision_size, len(self.layers), text_size, bias, merge_size, eps)
        return LlavaTower(self.vision, self.layers, self.drops_class, projector)

    def rename(self, name: str) -> str | None:
        """All but the text model."""
        return rename(name)


class Mistral3(Llava):
    """Mistral Small 3.1."""

    default_layer, default_bias = -1, False
    towers = ("pixtral",)

    def __init__(self, fields: Fields) -> None:
        values = {"image_token_index": 10, "spatial_merge_size": 2}
        given = {key: value for key, value in fields.values.items() if value is not None}
        super().__init__(fields.with_values({**values, **given}))


class LlavaNext(Llava):
    """LLaVA-NeXT."""

    towers: tuple[str, ...] = ("clip_vision_model", "siglip_vision_model")
    tiles_processor = "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil"
    default_points: tuple[tuple[int, int], ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    max_tiles: int | None = None
    """Whose states an image's tiles may have before they are resized; None: any number."""

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.processor = self.tiles_processor
        points = fields.values.get("image_grid_pinpoints")
        if points is None:
            points = [list(point) for point in self.default_points]
        self.tile_size = self.vision.integer("image_size", 1, MAX_SIZE)
        if not isinstance(points, list) or not all(
            isinstance(point, list)
            and len(point) == 2
            and all(type(size) is int and 0 < size < MAX_SIZE and size % self.tile_size == 0 for size in point)
            for point in points
        ):
            raise fields.error("image_grid_pinpoints", f"pairs of multiples of image_size={self.tile_size}")
        if not self.drops_class and "clip" in str(self.vision.values["model_type"]):
            raise fields.error("vision_feature_select_strategy", "default")
        self.arguments = {"image_grid_pinpoints": points}
        self.points = points

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Rows and columns of the states that are not padding, of all tiles together."""
        from quire_engine.encoders.anyres import shrunken, unpadded

        sizes = [int(size) for size in arrays["image_sizes"][0]]
        _, rows, columns = unpadded(sizes, self.points, self.tile_size, self.side)
        found = rows.stop - rows.start, columns.stop - columns.start
        return list(found if self.max_tiles is None else shrunken(*found, self.max_tiles, self.side))

    def layout_of_states(self, number: int, sizes: Mapping[str, Any]) -> list[int]:
        """One that has so many."""
        return [1, number - self.num_states - 1]

    def expand(self, layout: Sequence[int], image_token: str) -> str:
        """States of the whole image, then of its tiles, with one after each row."""
        rows, columns = layout
        return image_token * (self.num_states + rows * (columns + 1))

    def tower(self) -> "nn.Module":
        """The same for tiles."""
        from quire_engine.encoders.towers.llava import TiledTower

        return TiledTower(super().tower(), self.points, self.tile_size, self.side, self.max_tiles)


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision. Each image of a prompt is cut into tiles, also where it has several."""

    default_layer = -1
    towers = ("siglip_vision_model",)
    tiles_processor = "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil"
    default_points = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))

    def __init__(self, fields: Fields) -> None:
        given = {key: value for key, value in fields.values.items() if value is not None}
        values = {"image_token_index": 151646, "vision_feature_select_strategy": "full", **given}
        super().__init__(fields.with_values(values))
        fields.choice("vision_feature_select_strategy", ("full",), "full")
        name = "vision_aspect_ratio"
        number = str(values.get(name, "anyres_max_9")).removeprefix("anyres_max_")
        if not number.isascii() or not number.isdecimal() or not 0 < int(number) < MAX_SIZE:
            raise fields.error(name, "anyres_max_ and a number of tiles, as in anyres_max_9")
        self.max_tiles = int(number)
        index = fields.integer("video_token_index", 0, MAX_POSITIONS, 151647)
        self.video_token_id = fields.integer("video_token_id", 0, MAX_POSITIONS, index)

    def prepare_video(self, processor: Any, frames: "Sequence[Image]") -> tuple[Arrays, list[int]]:
        """Each frame as a square."""
        pixels = []
        for frame in frames:
            resized = np.asarray(frame.resize((self.tile_size, self.tile_size), processor.resample)).transpose(2, 0, 1)
            scaled = processor.rescale(resized, processor.rescale_factor)
            pixels.append(processor.normalize(scaled, processor.image_mean, processor.image_std))
        return {"pixel_values": np.stack(pixels).astype(np.float32)}, [len(frames)]

    def expand_video(
        self, layout: Sequence[int], seconds: Sequence[float], fps: float, image_token: str, video_token: str
    ) -> ExpandedVideo:
        """States of all frames, a fourth of an image's each, and one after them."""
        return ExpandedVideo("", video_token * (layout[0] * ((self.side + 1) // 2) ** 2 + 1))
