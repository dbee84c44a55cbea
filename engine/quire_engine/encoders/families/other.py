"""Any architecture whose images transformers prepares with Pillow alone: its processor says which tokens an image
becomes, and its own code computes their hidden states. Code of a checkpoint is never run."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_engine.encoders.families.base import Arrays, ImageFamily, NoImagesError
from quire_engine.errors import is_failure, one_line
from quire_engine.models.checkpoints.fields import Fields

if TYPE_CHECKING:
    from torch import nn

OF_TEXT = ("attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor makes of text besides the ids of its tokens."""
OF_TIMM = ("gemma3n_vision", "timm_wrapper")
"""Kinds of towers that transformers takes from the package timm."""


class Other(ImageFamily):
    """See `ImageFamily`.

    Args:
        fields: of `config.json`.
        architecture: its own.
        settings: of the image processor.
        others: of the processor of images and text.

    Raises:
        NoImagesError: transformers has no processor for it that can be used.
    """

    size_names = None

    def __init__(
        self, fields: Fields, architecture: str, settings: Mapping[str, Any], others: Mapping[str, Any]
    ) -> None:
        from transformers import AutoConfig

        auto: Any = import_module("transformers.models.auto.image_processing_auto")
        whole_auto: Any = import_module("transformers.models.auto.processing_auto")
        names = auto.IMAGE_PROCESSOR_MAPPING_NAMES
        self._folder, self._architecture = fields.path.parent, architecture
        self._settings, self._others = dict(settings), dict(others)
        model_type = str(fields.values.get("model_type"))
        by_name = {one.get("torchvision"): one["pil"] for one in names.values() if one.get("pil")}
        kind = names.get(model_type, {}).get("pil")
        if (named := self._settings.pop("image_processor_type", None)) is not None:
            kind = by_name.get(str(named).removesuffix("Pil").removesuffix("Fast"))
        whole = whole_auto.PROCESSOR_MAPPING_NAMES.get(model_type)
        vision = fields.values.get("vision_config")
        if isinstance(vision, dict) and vision.get("model_type") in OF_TIMM:
            raise self._no_images("its tower is code of the package timm, which needs torchvision beside torch")
        if kind is None:
            raise self._no_images("transformers has no image processor for it that needs Pillow alone")
        if whole is None:
            raise self._no_images("transformers has no processor for it")
        self.processor = kind
        try:
            self._prepare = self._make_processor(whole)
            tokenizer, token = self._prepare.tokenizer, self._prepare.image_token
            self.placeholder_id = tokenizer.convert_tokens_to_ids(token)
            if token not in tokenizer.get_vocab():  # it would have the id of unknown tokens
                raise self._no_images(f"its tokenizer has no {token}")
            config: Any = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
            self.image_token_id = int(config.image_token_id)
            self.other_state_ids = [int(one) for one in getattr(config, "visual_indicator_token_ids", ())]
        except BaseException as error:  # of transformers, which checks settings in its own ways, and of tokenizers
            if isinstance(error, NoImagesError) or not is_failure(error):
                raise
            raise self._no_images(f"its processor cannot be made: {one_line(error)}") from error

    def _no_images(self, reason: str) -> NoImagesError:
        return NoImagesError(f"{self._architecture} takes no images here: {reason}")

    def _make_processor(self, name: str) -> Any:
        """transformers' processor of images and text."""
        import transformers

        kind: Any = getattr(transformers, name)
        base = transformers.ProcessorMixin
        if kind.__call__ is not base.__call__ or kind.replace_image_token is base.replace_image_token:
            raise self._no_images("its processor does not say by itself which tokens an image becomes")
        # Videos and sounds are not taken, and need no processor.
        own: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            self._folder, local_files_only=True, trust_remote_code=False
        )
        images = getattr(transformers, self.processor)(**self._settings)
        parts = {**dict.fromkeys(own.get_attributes()), "image_processor": images, "tokenizer": tokenizer}
        return own.from_args_and_dict([], self._others, **parts)

    def prepare(self, images: Sequence[Any], return_tensors: str = "np") -> Arrays:
        """What the processor makes of one image; `input_ids` are the tokens that it becomes."""
        found = self._prepare(
            images=list(images), text=[self._prepare.image_token], return_tensors=return_tensors,
            text_kwargs={"add_special_tokens": False},
        )  # fmt: skip
        return {name: np.ascontiguousarray(value) for name, value in found.items() if name not in OF_TEXT}

    def layout(self, arrays: Mapping[str, Any]) -> list[int]:
        """Of each run of equal tokens, the token and their number."""
        runs = [(token_id, len(list(run))) for token_id, run in groupby(arrays["input_ids"][0].tolist())]
        return [number for run in runs for number in run]

    def expand(self, layout: Sequence[int], image_token: str) -> list[int]:
        """The tokens themselves."""
        return [token_id for token_id, length in zip(layout[::2], layout[1::2], strict=True) for _ in range(length)]

    def tower(self) -> "nn.Module":
        """The model without its text model."""
        from quire_engine.encoders.towers.transformers_tower import TransformersTower

        return TransformersTower(self._folder, [self.image_token_id, *self.other_state_ids], self.prepare)

    def rename(self, name: str) -> None:
        """None: transformers reads the files."""
