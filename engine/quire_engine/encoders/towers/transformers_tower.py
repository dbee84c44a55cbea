"""A tower in transformers' own code, for models whose images have no tower of ours."""

from pathlib import Path

import torch
from torch import nn


class TransformersTower(nn.Module):
    """The model of a checkpoint without its text model. Parameters are named `model.` and as in transformers' code.

    Args:
        folder: of `config.json`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        dtype = torch.get_default_dtype()
        self.model = AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)  # type: ignore[no-untyped-call]
        del self.model.language_model

    def pack(self) -> None:
        """Compute what files do not hold, such as the frequencies of rotary positions."""
        device = next(self.model.parameters()).device
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
                else:
                    buffer._is_hf_initialized = True
        for parameter in self.model.parameters():
            parameter._is_hf_initialized = True
        self.model.initialize_weights()

    def forward(self, **arrays: torch.Tensor) -> torch.Tensor:
        """What the image processor makes of an image → [n, E]"""
        found = self.model.get_image_features(**arrays, return_dict=True).pooler_output
        states = torch.cat(tuple(found)) if isinstance(found, list | tuple) else found
        return states.reshape(-1, states.shape[-1])
