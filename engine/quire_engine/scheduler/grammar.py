"""Grammar: the seam between the engine and whatever library knows which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Grammar", "GrammarError"]


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot go on; the message says why, for the one who sent it.

    Attributes:
        parameter: `structured_outputs` when the request is to blame, None when we are.
        cacheable: whether the same would come of another try.
        is_unavailable: whether there was no place for it, and the same request can succeed later.
        expires_at: on `time.monotonic`: until when it is worth remembering nevertheless.
    """

    def __init__(
        self,
        message: str,
        parameter: str | None = "structured_outputs",
        *,
        cacheable: bool = False,
        is_unavailable: bool = False,
    ) -> None:
        super().__init__(f"{parameter}: {message}" if parameter else message)
        self.parameter = parameter
        self.cacheable = cacheable
        self.is_unavailable = is_unavailable
        self.expires_at: float | None = None


class Grammar(Protocol):
    """How far one request's output has come in its grammar."""

    last_fill_seconds: float
    """CPU time that the last `fill_bitmask` took; 0 before the first."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens that were sampled and count; False when the grammar does not allow them."""
        ...

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        """Set, in one row, the bits of the tokens that may come next, and clear all others.

        Raises:
            GrammarError: no token may come next, or the grammar is too slow to go on with.
        """
        ...

    def fill_behind(self, drafts: Sequence[int], bitmask: npt.NDArray[np.int32], first_row: int) -> int:
        """Fill a row behind each draft, as if the drafts before it had been accepted. Changes nothing else: not how far
        the output has come, nor what the grammar is known to cost.

        Returns:
            How many rows were filled: up to a draft that the grammar does not allow, or that nothing may follow, or
            that took too long.
        """
        ...

    def is_terminated(self) -> bool:
        """Whether it has accepted the end-of-sequence token: nothing may follow."""
        ...
