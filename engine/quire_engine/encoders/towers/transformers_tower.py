"""Towers in transformers' own code, for models whose images have no tower of ours."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quire_engine.encoders.families.base import Arrays, NoImagesError
from quire_engine.errors import CheckpointError, cut
from quire_engine.models.fallback.attention import UnfitModelError
from quire_engine.models.fallback.wrapper import run, wrapper_class


class TransformersTower(nn.Module):
    """The model of a checkpoint without its text model, which transformers loads.

    Args:
        folder: the checkpoint.
        state_ids: the tokens whose rows images replace; empty: the family knows that these are the model's features of
            images, and how its text model takes them.
        prepare: what makes arrays of images, to try the model with one; None with the former.
    """

    def __init__(
        self,
        folder: Path,
        state_ids: Sequence[int] = (),
        prepare: Callable[[Sequence[Any]], Arrays] | None = None,
    ) -> None:
        super().__init__()
        self._folder, self._state_ids, self._prepare = folder, state_ids, prepare
        self._dtype = torch.get_default_dtype()

    def pack(self) -> None:
        """Load the weights, and try the model.

        Raises:
            CheckpointError: a tensor is missing, or has another shape.
            NoImagesError: our decoder would compute something else than the model.
        """
        from PIL import Image
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        kind, config = wrapper_class(self._folder)
        try:
            self.model, info = kind.from_pretrained(
                self._folder, config=config, dtype=self._dtype, local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except UnfitModelError as error:
            raise self._no_images(kind, error) from None
        for problem in ("missing_keys", "mismatched_keys"):
            if info[problem]:
                raise CheckpointError(
                    f"{self._folder}: {problem.replace('_', ' ')}: {cut(str(sorted(map(str, info[problem]))))}"
                )
        if self._prepare is None:
            return
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (53, 77, 3), dtype=np.uint8))
        with torch.inference_mode():
            self(**{name: torch.from_numpy(value) for name, value in self._prepare([image]).items()})

    def _no_images(self, kind: type, error: Exception) -> NoImagesError:
        return NoImagesError(f"{kind.__name__} takes no images here: it {error}")

    def forward(self, **arrays: torch.Tensor) -> torch.Tensor:
        """What the image processor makes of an image → [n, E]"""
        if not self._state_ids:
            found = self.model.get_image_features(**arrays, return_dict=True).pooler_output
            states = torch.cat(tuple(found)) if isinstance(found, list | tuple) else found
            return states.reshape(-1, states.shape[-1])
        ids = arrays.pop("input_ids")[0]
        arrays = {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in arrays.items()}
        try:
            return run(self.model, ids, self._state_ids, arrays)
        except UnfitModelError as error:
            raise self._no_images(type(self.model), error) from None
