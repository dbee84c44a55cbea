"""MedusaDrafter: drafts all tokens at once, from the hidden state of the last one (Cai et al. 2024,
https://arxiv.org/abs/2401.10774). It keeps nothing between steps."""

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.messages import DraftTokens
from quire_engine.models.medusa import MedusaHeads
from quire_engine.worker.drafting.draft_sampling import DraftSampling

__all__ = ["MedusaDrafter"]

Int64Array = npt.NDArray[np.int64]


class MedusaDrafter:
    """A `DraftMethod`. Each head drafts a place, so drafts are as long as there are heads, or shorter."""

    needs_hidden = True
    bytes_per_block = 0
    recorded_bytes = 0

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads

    def initialize_cache(self, num_blocks: int) -> None:
        """It has none."""

    def forget_blocks(self, block_ids: list[int]) -> None:
        """It knows none."""

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        """See `DraftMethod`."""
        assert hidden_SE is not None
        logits_SHV = self._heads.logits(hidden_SE)
        for place in range(min(sampling.num_places, self._heads.num_heads)):
            sampling.draw(logits_SHV[: sampling.num_rows(place), place])
        return sampling.drafts()
