"""Pooling: the result of a request that reads hidden states instead of generating tokens.

A worker hands the hidden states of a prompt (after the last norm) to the request's `Pool`, chunk by chunk as they are
computed. The last chunk ends the request, and the pool's result is its answer. A pool knows no tokens and no batch.
"""

from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from quire_engine.errors import RequestError, quote

if TYPE_CHECKING:
    import torch


class Pool(Protocol):
    """Pools the hidden states of one prompt. A preempted request begins again with a new pool."""

    needs_every_token: ClassVar[bool]
    """Whether it reads every position, so that no prefix comes from the cache; else only the last one."""

    def add(self, hidden_TE: "torch.Tensor") -> None:
        """Take the next positions, in order. The tensor is overwritten after the call."""

    def result(self) -> "torch.Tensor":
        """[E] float32, once the prompt's last position was added."""


class LastToken:
    """A `Pool`: the hidden state of the last token."""

    needs_every_token: ClassVar[bool] = False

    def add(self, hidden_TE: "torch.Tensor") -> None:
        """Keep the last row alone."""
        self._last_E = hidden_TE[-1].clone()

    def result(self) -> "torch.Tensor":
        """[E] float32."""
        return self._last_E.float()


POOLS: dict[str, type[Pool]] = {"last": LastToken}
"""Task → its pool."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What `LLM.encode` returns of a prompt's hidden states.

    Raises:
        RequestError: there is no such task.
    """

    task: str = "last"
    """`last`: the hidden state of the last token, after the last norm."""

    def __post_init__(self) -> None:
        """Check the task."""
        if self.task not in POOLS:
            raise RequestError("task", f"task is {quote(self.task)}; it must be one of {', '.join(sorted(POOLS))}")
