"""Builders and a stand-in model for tests that need neither tensors nor a checkpoint.

`FakeModelRunner` keeps a real (if small) KV cache: one number per slot that stands for everything up to that token, as
keys and values of a deep layer do; with several groups of layers, one for each. It reads every request back through its
block table before it samples, of a group with a window as much as a row sees, so a block that was shared, reused, freed
or reintroduced wrongly is noticed at once, by name. The tokens depend on nothing but the tokens
before them: `undisturbed_output` says in one line what any schedule must produce. Of a group of states it keeps the
number after a token, from which a request goes on, and the tokens after it (`quire_kernels.states`).

Like `scheduler/` and `kv_cache/`, this module never imports torch.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Protocol

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import STATE, KVCacheGroups, KVCacheManager
from quire_engine.messages import (
    DraftTokens,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVConnectorMetadata,
    ModelRunnerOutput,
    SchedulerOutput,
)
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.scheduler.adapters import AdapterScheduler
from quire_engine.scheduler.drafter import PATIENCE, Drafter, Proposer
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import FillBitmask, Scheduler
from quire_engine.scheduler.step_time import StepCurve

__all__ = [
    "VOCAB_SIZE",
    "FakeModelRunner",
    "FixedCosts",
    "RandomProposer",
    "draft_always",
    "draft_partly_right",
    "draft_right",
    "draft_with",
    "make_request",
    "make_requests",
    "make_scheduler",
    "next_token",
    "run_step",
    "true_continuation",
    "undisturbed_output",
]

VOCAB_SIZE = 64
"""Of the stand-in model: small, so that an end-of-sequence id is sampled now and then."""

_RUBBISH = -1
"""In slots and tokens of a step that failed."""

_request_numbers = count()


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    windows: tuple[int | None, ...] = (None,),
    snapshot_blocks: int = 0,
    num_states: int = 0,
    clock: Callable[[], float] = time.monotonic,
    pipeline_parallel_size: int = 1,
    async_scheduling: bool = False,
    sends_new_token_ids: bool = False,
    fill_bitmask: FillBitmask | None = None,
    adapters: AdapterScheduler | None = None,
    **settings: Any,
) -> Scheduler:
    """A scheduler over a KV cache of its own, for groups of layers with these windows; `settings` are those of
    `SchedulerConfig`."""
    return Scheduler(
        SchedulerConfig(**settings),
        KVCacheManager(
            num_blocks, block_size, enable_prefix_caching, KVCacheGroups(windows, (), snapshot_blocks), num_states
        ),
        clock,
        pipeline_parallel_size=pipeline_parallel_size,
        async_scheduling=async_scheduling,
        sends_new_token_ids=sends_new_token_ids,
        fill_bitmask=fill_bitmask,
        adapters=adapters,
    )


def make_request(
    prompt: Sequence[int],
    *,
    request_id: str | None = None,
    eos_token_ids: Sequence[int] = (),
    max_model_len: int = 2**31,
    params: SamplingParams | None = None,
    options: RequestOptions = NO_OPTIONS,
) -> Request:
    """A request with a name of its own: `request-0`, `request-1`, … unless one is given."""
    name = request_id or f"request-{next(_request_numbers)}"
    message = EngineCoreRequest(name, [*prompt], params or SamplingParams(), options)
    return Request(message, eos_token_ids, max_model_len)


def make_requests(num_requests: int, *, prompt_length: int = 8, max_tokens: int = 4) -> list[Request]:
    """Requests `r0`, `r1`, … whose prompts differ from their first token on, so that they share no prefix."""
    return [
        make_request(
            [number, *range(1, prompt_length)], request_id=f"r{number}", params=SamplingParams(max_tokens=max_tokens)
        )
        for number in range(num_requests)
    ]


# -- the stand-in model ------------------------------------------------------------------------------------------------

_SEED = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _extend(state: int, token_id: int) -> int:
    """What the model knows after one more token."""
    state = (state ^ (token_id + 1)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 29)


def _sample(state: int) -> int:
    return (state >> 16) % VOCAB_SIZE


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the stand-in model puts after these."""
    state = _SEED
    for token_id in token_ids:
        state = _extend(state, token_id)
    return _sample(state)


class RandomProposer:
    """Drafts of any length for some requests, of which each token is right or wrong at random.

    Args:
        random: decides.
        continuation: (request, n) → the n tokens that come next, or fewer where the output ends.
        vocab_size: wrong ones are below it.
    """

    def __init__(
        self,
        random: Random,
        continuation: Callable[[Request, int], list[int]],
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._random = random
        self._continuation = continuation
        self._vocab_size = vocab_size
        self.num_drafts = 0
        self.share = 0.8
        """Of the tokens that are right."""

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        """Up to as many as asked for."""
        drafts = self._continuation(request, self._random.randint(0, max_tokens))
        self.num_drafts += len(drafts)
        token_ids = [
            token_id if self._random.random() < self.share else self._random.randrange(self._vocab_size)
            for token_id in drafts
        ]
        return DraftTokens(request.num_tokens, token_ids, [1.0] * len(token_ids))

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


class FixedCosts(StepCurve):
    """A step takes a second, and so long for each of its tokens. Asking takes no time.

    Where tokens take none, all drafts are worth computing.
    """

    def __init__(self, seconds_per_token: float = 0.0) -> None:
        super().__init__()
        self.seconds_per_token = seconds_per_token
        self.unknown: set[int] = set()
        """Sizes of steps, in tokens."""

    def record_proposals(self, number: int, seconds: float, *, is_upper_bound: bool = False) -> None:
        """It is not counted."""

    def record_drafting(self, number: int, seconds: float) -> None:
        """Nor is this."""

    def is_unknown(self, num_tokens: int) -> bool:
        """Only if it is in `unknown`."""
        return num_tokens in self.unknown

    def are_known(self) -> bool:
        """From the start."""
        return True

    def seconds(self, num_tokens: int, num_drafts: int) -> list[float]:
        """Of steps with 0, 1, 2, … drafts."""
        return [1.0 + self.seconds_per_token * size for size in range(num_tokens, num_tokens + num_drafts + 1)]


def draft_right(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What the stand-in model puts after these tokens."""
    known = list(token_ids)
    for _ in range(num_tokens):
        known.append(next_token(known))
    return known[len(token_ids) :]


def draft_partly_right(token_ids: Sequence[int], num_tokens: int) -> list[int] | None:
    """Some of the tokens that come next, among wrong ones; now and then none, or none at all (None). The same tokens
    have the same drafts."""
    random = Random(str(token_ids))
    if random.random() < 0.1:
        return None
    return [
        token_id if random.random() < 0.8 else random.randrange(VOCAB_SIZE)
        for token_id in draft_right(token_ids, random.randint(0, num_tokens))
    ]


def draft_with(
    scheduler: Scheduler,
    proposer: Proposer | None,
    vocab_size: int = VOCAB_SIZE,
    most: int = 7,
    costs: FixedCosts | None = None,
    patience: int = PATIENCE,
) -> None:
    """Draft tokens for requests that are added from now on; without a proposer, the workers do."""
    rows = scheduler.config.max_num_sampled_rows
    reads_prompts = scheduler._drafter is None or scheduler._drafter._reads_prompts
    scheduler._drafter = Drafter(proposer, vocab_size, most, rows, costs, patience, reads_prompts=reads_prompts)


def draft_always(
    scheduler: Scheduler,
    proposer: Proposer | None,
    vocab_size: int = VOCAB_SIZE,
    most: int = 7,
    propose_seconds: float = 0.0,
) -> None:
    """Draft at most so many tokens of a request in a step, whatever they are worth; but where asking for them takes
    time, in steps without drafts, a request rests now and then, from the first time in vain on."""
    costs = FixedCosts()
    costs.propose_seconds = propose_seconds
    draft_with(scheduler, proposer, vocab_size, most, costs, patience=0)


def true_continuation(request: Request, num_tokens: int) -> list[int]:
    """What the stand-in model puts after a request's tokens."""
    return draft_right(request.all_token_ids, num_tokens)


def undisturbed_output(request: Request) -> tuple[list[int], FinishReason]:
    """The output tokens and the reason that a request ends with when nobody fails or aborts it. Leaves it unchanged."""
    prompt = request.all_token_ids[: request.num_prompt_tokens]
    twin = Request(EngineCoreRequest(request.request_id, prompt, request.sampling_params), tuple(request.eos_token_ids))
    twin.max_tokens = request.max_tokens
    state = _SEED
    for token_id in twin.all_token_ids:
        state = _extend(state, token_id)
    while True:
        token_id = _sample(state)
        state = _extend(state, token_id)
        twin.all_token_ids.append(token_id)
        stopped = twin.check_stop()
        if stopped:
            return twin.all_token_ids[twin.num_prompt_tokens :], stopped[0]


@dataclass(slots=True)
class _WorkerRequest:
    """What a worker remembers of one request between steps."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    states: list[int] = field(default_factory=list)
    """`states[i]` is what the model knows after token i: what its slot has to hold."""
    num_state_tokens: int = 0
    """After how many tokens the state is that its next step goes on from."""
    state_block: int = -1
    """The block that it is in; -1: it begins with none."""


@dataclass(slots=True)
class _StateBlock:
    state: int = 0
    ring: dict[int, int] = field(default_factory=dict)
    """The last tokens of the step that wrote it, by their positions."""


class Connector(Protocol):
    """A rank's half of a KV connector."""

    def begin_step(self, metadata: KVConnectorMetadata, slots: list[int], states: list[Any]) -> None:
        """Do what a step asks for, before it computes."""


class FakeModelRunner:
    """Carries out scheduled steps like a worker does, and asserts that each message fits what it was told before.

    Checked at every step: a dropped request is known and told once; a new one is not known; what is said of a known one
    agrees with the worker's own count; there is a block for every token; no slot is written twice in a step; and after
    the writes of the whole step, each request finds its own tokens behind its block table. If drafts are wanted of a
    request, the step samples it, and there are blocks for them.

    Like a worker that takes steps ahead, it computes a step when that is submitted: what it samples is there for the
    next step at once, and for everybody else when it is collected. A step behind one that has failed fails as well.

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens per block.
        fails: called with `(request id, number of output tokens so far)` for each request about to be sampled; when it
            is true for one, the step overwrites all slots that it computed with rubbish and fails.
        windows: of the groups of layers.
        num_states: blocks of states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fails: Callable[[str, int], bool] = lambda request_id, num_output: False,
        windows: tuple[int | None, ...] = (None,),
        num_states: int = 0,
    ) -> None:
        self.num_paged = len(windows) - (windows[-1] == STATE)
        self._states = [_StateBlock() for _ in range(num_states)]
        self.block_size = block_size
        self.windows = windows
        self.fails = fails
        self.draft: Callable[[Sequence[int], int], list[int] | None] = draft_right
        """(all tokens of a request, n) → at most n that may come next, if drafts are wanted; None if that fails."""
        self.connector: Connector | None = None
        self.num_steps = 0
        self._slots = [0] * (num_blocks * block_size)
        self._requests: dict[str, _WorkerRequest] = {}
        self._results: deque[ModelRunnerOutput | RuntimeError] = deque()
        """Of the steps that are submitted and not collected."""

    @classmethod
    def for_scheduler(
        cls, scheduler: Scheduler, fails: Callable[[str, int], bool] = lambda request_id, num_output: False
    ) -> "FakeModelRunner":
        """A runner with the cache that the scheduler plans for."""
        kv_cache = scheduler.kv_cache
        pool, windows = kv_cache.block_pool, kv_cache.groups.windows
        num_states = kv_cache.num_blocks if windows == (STATE,) else pool.num_states
        return cls(kv_cache.num_blocks, kv_cache.block_size, fails, windows, num_states)

    @property
    def known_request_ids(self) -> set[str]:
        """Requests that the worker has been told of and not told to forget."""
        return set(self._requests)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Submit one step and collect it."""
        self.submit(scheduler_output)
        return self.collect()

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Compute one step.

        Raises:
            AssertionError: the message contradicts an earlier one, or the KV cache holds something else.
        """
        self.num_steps += 1
        if scheduler_output.kv_connector_metadata is not None:
            assert self.connector is not None
            self.connector.begin_step(scheduler_output.kv_connector_metadata, self._slots, self._states)
        follows_failure = any(isinstance(result, RuntimeError) for result in self._results)
        self._update_states(scheduler_output)
        drafts = scheduler_output.draft_token_ids
        sampling = [
            request_id
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if (request := self._requests[request_id]).num_computed_tokens + num_tokens
            == len(request.token_ids) + len(drafts.get(request_id, ()))
        ]
        assert drafts.keys() <= set(sampling), "drafts stand behind a request's last token"
        failure = "a step before failed" if follows_failure else self._compute(scheduler_output, sampling)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._requests[request_id].num_computed_tokens += num_tokens
        output = ModelRunnerOutput(sampled_token_ids={})
        for request_id in sampling:
            request, own = self._requests[request_id], drafts.get(request_id, [])
            token_ids = [_RUBBISH] if failure else self._accept(request, own)
            request.token_ids += token_ids
            request.num_computed_tokens -= len(own) + 1 - len(token_ids)
            del request.states[request.num_computed_tokens :]
            output.sampled_token_ids[request_id] = token_ids
        if not failure:
            self._draft(scheduler_output, output)
        self._results.append(RuntimeError(failure) if failure else output)

    def _accept(self, request: _WorkerRequest, drafts: list[int]) -> list[int]:
        """What the model samples behind the last token, and behind each draft for as long as they were right."""
        token_ids: list[int] = []
        for draft, state in zip([*drafts, None], request.states[len(request.token_ids) - 1 :], strict=True):
            token_ids.append(_sample(state))
            if token_ids[-1] != draft:
                break
        return token_ids

    def _draft(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Draft where that is wanted. The blocks have to suffice if all drafts of the step had been accepted."""
        for request_id, num_wanted in scheduler_output.num_drafts_wanted.items():
            assert request_id in output.sampled_token_ids, f"{request_id} has no new token to draft after"
            request, own = self._requests[request_id], scheduler_output.draft_token_ids.get(request_id, [])
            num_rejected = len(own) + 1 - len(output.sampled_token_ids[request_id])
            num_inputs = len(request.token_ids) + num_rejected + num_wanted - 1  # the last draft is not computed
            assert num_wanted > 0
            assert self._num_slots(request) >= num_inputs, f"{request_id}: too few blocks for drafts"
            drafts = self.draft(request.token_ids, num_wanted)
            if drafts is not None:
                output.drafts[request_id] = DraftTokens(len(request.token_ids), drafts, [1.0] * len(drafts))

    def collect(self) -> ModelRunnerOutput:
        """What came of the oldest step that is not collected yet.

        Raises:
            RuntimeError: `fails` said so of this step or of one before.
        """
        result = self._results.popleft()
        if isinstance(result, RuntimeError):
            raise result
        return result

    def _compute(self, scheduler_output: SchedulerOutput, sampling: Sequence[str]) -> str | None:
        """Write and read the slots of a step; returns why it failed, or None."""
        written: list[int] = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            drafts = scheduler_output.draft_token_ids.get(request_id, [])
            written += self._write(request_id, self._requests[request_id], num_tokens, drafts)
        assert len(set(written)) == len(written), "two requests write the same slot in one step"
        states = self._write_states(scheduler_output) if self._states else ()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._read_back(request_id, self._requests[request_id], num_tokens)
        for request_id in sampling:
            request = self._requests[request_id]
            if self.fails(request_id, len(request.token_ids) - request.num_prompt_tokens):
                for slot in written:
                    self._slots[slot] = _RUBBISH
                for block_id in states:
                    self._states[block_id] = _StateBlock(_RUBBISH)
                return f"{request_id} made the step fail"
        return None

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.dropped_request_ids:
            assert request_id in self._requests, f"{request_id} is dropped, but was not known"
            del self._requests[request_id]
        for new in scheduler_output.new_requests:
            assert new.request_id not in self._requests, f"{new.request_id} is introduced twice"
            self._requests[new.request_id] = _WorkerRequest(
                list(new.token_ids), new.num_prompt_tokens, list(new.block_ids), new.num_computed_tokens
            )
            if self._states and new.num_computed_tokens:
                request = self._requests[new.request_id]
                request.num_state_tokens = new.num_computed_tokens
                request.state_block = self._state_block(request, new.num_computed_tokens - 1)
        cached = scheduler_output.cached_requests
        for request_id, block_ids, num_computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert request_id in self._requests, f"{request_id} goes on, but is not known"
            request = self._requests[request_id]
            assert num_computed == request.num_computed_tokens, f"{request_id}: the scheduler counts otherwise"
            request.block_ids += block_ids
        told = [*cached.request_ids, *(new.request_id for new in scheduler_output.new_requests)]
        assert sorted(told) == sorted(scheduler_output.num_scheduled_tokens), "scheduled and told differ"

    def _num_slots(self, request: _WorkerRequest) -> int:
        assert len(request.block_ids) % len(self.windows) == 0, "a group has fewer blocks than another"
        return len(request.block_ids) // len(self.windows) * self.block_size

    def _slot(self, request: _WorkerRequest, position: int, group: int) -> int:
        block_id = request.block_ids[position // self.block_size * len(self.windows) + group]
        return block_id * self.block_size + position % self.block_size

    def _write(self, request_id: str, request: _WorkerRequest, num_tokens: int, drafts: list[int]) -> list[int]:
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        token_ids = request.token_ids + drafts
        assert num_tokens > 0, f"{request_id} is scheduled for nothing"
        assert end <= len(token_ids), f"{request_id} is scheduled beyond its tokens"
        if self.windows == (None,):
            assert len(set(request.block_ids)) == len(request.block_ids), f"{request_id} has a block twice"
        assert self._num_slots(request) >= end, f"{request_id} has too few blocks"
        for token_id in token_ids[len(request.states) : end]:
            request.states.append(_extend(request.states[-1] if request.states else _SEED, token_id))
        written = []
        for group in range(self.num_paged):
            slots = [self._slot(request, position, group) for position in range(first, end)]
            for slot, state in zip(slots, request.states[first:end], strict=True):
                self._slots[slot] = state + group
            written += slots
        return written

    def _read_back(self, request_id: str, request: _WorkerRequest, num_tokens: int) -> None:
        end = request.num_computed_tokens + num_tokens
        for group, window in enumerate(self.windows[: self.num_paged]):
            first = 0 if window is None else max(request.num_computed_tokens - window + 1, 0)
            found = [self._slots[self._slot(request, position, group)] - group for position in range(first, end)]
            assert found == request.states[first:end], f"{request_id}: its blocks of group {group} hold something else"

    def _state_block(self, request: _WorkerRequest, position: int) -> int:
        """The block for the state after the block of a position; -1: none is kept."""
        return request.block_ids[position // self.block_size * len(self.windows) + len(self.windows) - 1]

    def _write_states(self, scheduler_output: SchedulerOutput) -> list[int]:
        """Read the state that each request goes on from, and write those that the step stores. All requests are
        computed at once: none writes a block that another one reads or writes."""
        owners: dict[int, str] = {}
        readers: dict[int, str] = {}
        written: dict[int, _StateBlock] = {}
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request, drafts = self._requests[request_id], scheduler_output.draft_token_ids.get(request_id, [])
            start, base, size = request.num_computed_tokens, request.num_state_tokens, self.block_size
            token_ids, end = request.token_ids + drafts, start + num_tokens
            known = end - len(drafts)
            if request.state_block >= 0:
                source = self._states[request.state_block]
                assert source.state == request.states[base - 1], f"{request_id} goes on from another state"
                replayed = [source.ring.get(position) for position in range(base, start)]
                assert replayed == token_ids[base:start], f"{request_id}: its drafts are lost"
                readers[request.state_block] = request_id
            else:
                assert base == start == 0, f"{request_id} has no state"
            target = self._state_block(request, end - 1)
            assert target >= 0, f"{request_id} has no place for its state"
            ring = {position: token_ids[position] for position in range(start, end)}
            stores = {self._state_block(request, full * size - 1): full * size for full in
                      range(base // size + 1, known // size + 1)}  # fmt: skip
            stores.pop(-1, None)
            for block_id, length in {**stores, target: known}.items():
                assert owners.setdefault(block_id, request_id) == request_id, "two requests write a state at once"
                written[block_id] = _StateBlock(request.states[length - 1], ring if block_id == target else {})
            request.num_state_tokens, request.state_block = known, target
        for block_id, request_id in readers.items():
            assert owners.get(block_id, request_id) == request_id, "a request writes the state that another one reads"
        for block_id, state in written.items():
            self._states[block_id] = state
        return list(written)


def run_step(scheduler: Scheduler, runner: FakeModelRunner) -> list[EngineCoreOutput]:
    """One step of an engine: schedule, execute, and take in what came of it, a failure included."""
    scheduler_output = scheduler.schedule()
    try:
        runner_output = runner.execute_model(scheduler_output)
    except RuntimeError as error:
        return scheduler.recover_from_failed_step(scheduler_output, str(error))
    return scheduler.update_from_output(scheduler_output, runner_output)
