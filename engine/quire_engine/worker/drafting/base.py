"""DraftMethod: what drafts tokens by a model."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.messages import DraftTokens
from quire_engine.worker.drafting.draft_sampling import DraftSampling

__all__ = ["DraftMethod"]

Int64Array = npt.NDArray[np.int64]


class DraftMethod(Protocol):
    """Drafts the tokens after the last known one of each request."""

    needs_hidden: bool
    """Whether it reads the target's hidden states of the last step."""

    @property
    def bytes_per_block(self) -> int:
        """Memory that it takes for each KV block."""

    @property
    def recorded_bytes(self) -> int:
        """Memory of the results that recorded ops write, once its cache is there."""

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate what it keeps for each block; free what it kept before. With 0, nothing is left."""

    def forget_blocks(self, block_ids: list[int]) -> None:
        """These blocks now belong to other tokens."""

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        """Draft.

        Args:
            slots: [S], whose tokens are all known, in the order of `sampling`.
            hidden_SE: if it needs them, the target's hidden states at the tokens before the last known ones.
            sampling: takes the logits of one place of the drafts after the other.

        Returns:
            For each request, what `sampling` drew.
        """
