"""DraftModel: a smaller checkpoint with the same vocabulary drafts (Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318)."""

from collections.abc import Callable, Sequence

import torch

from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches, RecordableLM

__all__ = ["DraftModel"]


class DraftModel:
    """A `ChainModel`.

    Args:
        model: all of it, on one rank.
        allocate_caches: (its layers, number of blocks) → their keys and values.
    """

    token_offset = 0

    def __init__(
        self, model: RecordableLM, allocate_caches: Callable[[Sequence[AttentionSpec], int], KVCaches]
    ) -> None:
        self._model = model
        self.input_widths: Sequence[int] = [model.hidden_size]
        self.out_width = model.hidden_size
        self.dtype = model.dtype
        self.attention_specs = model.attention_specs
        self._allocate_caches = allocate_caches

    def allocate_caches(self, num_blocks: int) -> KVCaches:
        """See `ChainModel`."""
        return self._allocate_caches(self.attention_specs, num_blocks)

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        """See `ChainModel`."""
        return [self._model.embed(token_ids_T)]

    def drafted_inputs(self, token_ids_T: torch.Tensor, out_TE: torch.Tensor) -> list[torch.Tensor]:
        """See `ChainModel`."""
        return [self._model.embed(token_ids_T)]

    def layers(self, inputs: Sequence[torch.Tensor], context: ForwardContext, kv_caches: KVCaches) -> torch.Tensor:
        """See `ChainModel`."""
        return self._model.final_norm(*self._model.run_layers(inputs[0], None, context, kv_caches))

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """See `ChainModel`."""
        logits_SV = self._model.compute_logits(out_SE)
        assert logits_SV is not None, "it is on one rank"
        return logits_SV
