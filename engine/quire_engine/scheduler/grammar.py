"""Grammar: the seam between the engine and the library that decides which tokens are allowed next."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class GrammarError(Exception):
    """A grammar cannot be compiled, or cannot go on; the message is for the caller.

    Attributes:
        parameter: `structured_outputs` if the request is at fault, None if the engine is.
        cacheable: whether another try would fail in the same way.
        is_unavailable: whether there was no capacity; the same request can succeed later.
        expires_at: time on `time.monotonic` up to which the error is cached even if not `cacheable`.
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
    """The position of one request's output in its grammar."""

    last_fill_seconds: float
    """CPU time that the last `fill_bitmask` took; 0 before the first."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens that the output keeps; False if the grammar does not allow them."""
        ...

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        """Set, in one row, the bits of the tokens that are allowed next, and clear all others.

        Raises:
            GrammarError: no token is allowed next, or the grammar is too slow to go on.
        """
        ...

    def fill_behind(self, drafts: Sequence[int], bitmask: npt.NDArray[np.int32], first_row: int) -> int:
        """Fill one row for the token after each draft, as if the drafts up to it had been accepted. Changes nothing
        else: neither the grammar's position nor its measured cost.

        Returns:
            How many rows were filled. It stops at a draft that the grammar does not allow, that nothing may follow, or
            that took too long.
        """
        ...

    def is_terminated(self) -> bool:
        """Whether it has accepted the end-of-sequence token: nothing may follow."""
        ...
