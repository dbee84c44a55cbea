"""Drafting: what happens at the end of a step that drafts are wanted after, by a DraftMethod."""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.device.transfer import upload
from quire_engine.messages import DraftTokens, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling import DraftsToVerify
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import SampledRows
from quire_engine.worker.drafting.draft_sampling import DraftSampling

logger = logging.getLogger(__name__)

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


class _Drawn(NamedTuple):
    """The last drafts of a request that are to be accepted by chance."""

    generation: int
    drafts: DraftTokens
    distributions: torch.Tensor
    """[number of drafts, V]"""


class Drafting:
    """Lets a method draft, once the tokens of a step are known.

    Args:
        method: drafts.
        batch: the requests.
        device: of the model.
        by_chance: whether drafts of sampled requests are accepted by chance. Not those with a grammar: drafts
            that leave it are cut, and that depends on which token they are.
        clock: of the steps, see `Executor.clock`.
    """

    def __init__(
        self,
        method: DraftMethod,
        batch: InputBatch,
        device: torch.device,
        by_chance: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.method, self._batch, self._device, self._by_chance = method, batch, device, by_chance
        self._num_failures = 0
        self._first_drawn_at: float | None = None
        """By the clock, in the last step that drafted; None: it failed."""
        self._clock = clock
        self._drawn: dict[int, _Drawn] = {}
        """By slot."""

    def initialize_cache(self, num_blocks: int) -> None:
        """Let the method allocate what it keeps for so many blocks, and forget what it drafted before; 0 frees it."""
        self._drawn.clear()
        self.method.initialize_cache(num_blocks)

    def forget(self, request_id: str) -> None:
        """A request is about to lose its slot."""
        self._drawn.pop(self._batch.slots.get(request_id, -1), None)

    def update_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Take note of blocks that belong to other tokens from this step on. Blocks of states have other numbers."""
        block_ids: list[int] = []
        num_groups = len(self._batch.block_tables)
        for request in scheduler_output.new_requests:
            num_found = request.num_computed_tokens // self._batch.block_size * num_groups
            block_ids += request.block_ids[num_found:]
        for own in scheduler_output.cached_requests.new_block_ids:
            block_ids += own
        if self._batch.has_states:
            del block_ids[num_groups - 1 :: num_groups]
        if block_ids:
            self.method.forget_blocks(block_ids)

    def to_verify(self, sampled: SampledRows) -> DraftsToVerify | None:
        """The drafts of a step that are accepted by chance. The batch does not have its tokens yet."""
        rows: list[int] = []
        token_ids: list[int] = []
        distributions: list[torch.Tensor] = []
        if self._drawn:
            for request_id, first in zip(sampled.request_ids, sampled.starts.tolist(), strict=True):
                own, slot = sampled.drafts.get(request_id, ()), int(sampled.slots[first])
                drawn = self._drawn.pop(slot, None)
                if drawn is None or drawn.generation != self._batch.generation[slot]:
                    continue
                start, drafts = drawn.drafts.start, drawn.drafts.token_ids[: len(own)]
                if own and start == self._batch.num_tokens[slot] and list(own) == drafts:
                    rows += range(first, first + len(own))
                    token_ids += own
                    distributions.append(drawn.distributions[: len(own)])
        if not rows:
            return None
        rows_R, token_ids_R = upload(self._device, np.array(rows), np.array(token_ids))
        return DraftsToVerify(rows=rows_R, token_ids=token_ids_R, probabilities=torch.cat(distributions))

    def after(
        self, scheduler_output: SchedulerOutput, sampled: SampledRows, hidden_RE: torch.Tensor
    ) -> Callable[[ModelRunnerOutput], None]:
        """What is to be called with the step's result, as soon as the batch has its tokens.

        Args:
            scheduler_output: the step, which drafts are wanted after.
            sampled: its rows.
            hidden_RE: their hidden states; overwritten by the next step.
        """
        wanted = scheduler_output.num_drafts_wanted
        generations = {request_id: self._generation(request_id) for request_id in wanted}
        kept = hidden_RE.clone() if self.method.needs_hidden else None

        def draft(output: ModelRunnerOutput) -> None:
            """If it fails, there are no drafts: the step's tokens are as good without."""
            began_at, self._first_drawn_at = self._clock(), None
            try:
                with self._batch.lock, torch.inference_mode():
                    live = [name for name in wanted if self._generation(name) == generations[name] is not None]
                    live.sort(key=lambda name: -wanted[name])
                    if live:
                        self._draft(live, scheduler_output, sampled, kept, output)
            except Exception as error:
                self._num_failures += 1
                is_first = self._num_failures == 1
                if self._num_failures & (self._num_failures - 1) == 0:  # 1, 2, 4, 8 …: it may fail in every probe
                    logger.log(
                        logging.ERROR if is_first else logging.WARNING,
                        "no tokens are drafted after a step of %d requests, %d times so far: %r",
                        len(sampled.request_ids), self._num_failures, error, exc_info=error if is_first else None,
                    )  # fmt: skip
            output.draft_seconds = self._clock() - began_at
            first_at = self._first_drawn_at
            output.first_draft_seconds = output.draft_seconds if first_at is None else first_at - began_at

        return draft

    def _generation(self, request_id: str) -> int | None:
        """Which request of its slot this is; None if it has none."""
        slot = self._batch.slots.get(request_id)
        return None if slot is None else int(self._batch.generation[slot])

    def _draft(
        self,
        request_ids: list[str],
        step: SchedulerOutput,
        sampled: SampledRows,
        hidden_RE: torch.Tensor | None,
        output: ModelRunnerOutput,
    ) -> None:
        """Draft for these requests, of which the first ones want the most drafts."""
        batch, slots = self._batch, np.array([self._batch.slots[name] for name in request_ids])
        counts, by_chance, hidden_SE = np.array([step.num_drafts_wanted[name] for name in request_ids]), None, None
        if self._by_chance:
            with_grammar = () if step.grammar_bitmask is None else frozenset(step.grammar_bitmask.request_ids)
            by_chance = (batch.temperature[slots] > 0) & np.array([name not in with_grammar for name in request_ids])
            by_chance = by_chance if by_chance.any() else None
        if hidden_RE is not None:  # those that each request's last token was sampled from
            firsts = dict(zip(sampled.request_ids, sampled.starts.tolist(), strict=True))
            rows = [firsts[name] + len(output.sampled_token_ids[name]) - 1 for name in request_ids]
            hidden_SE = hidden_RE[upload(self._device, np.array(rows))[0]]
        sampling = DraftSampling(
            batch, slots, counts, self._device, by_chance, self._clock, step.least_draft_chance, step.draft_chances
        )
        drafts = self.method.draft(slots, hidden_SE, sampling)
        self._first_drawn_at = sampling.first_drawn_at
        output.drafting_stopped = sampling.has_stopped
        output.drafts = dict(zip(request_ids, drafts, strict=True))
        if by_chance is not None:
            for row, slot in enumerate(slots.tolist()):
                distributions_KV = sampling.distributions(row)
                if distributions_KV is not None:
                    self._drawn[slot] = _Drawn(int(batch.generation[slot]), drafts[row], distributions_KV)
