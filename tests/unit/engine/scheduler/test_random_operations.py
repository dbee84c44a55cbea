"""Short random lives of a scheduler: its books balance after every operation, whatever comes together.

QUIRE_RANDOM_LIVES=2500 make test ARGS="tests/unit/engine/scheduler/test_random_operations.py -k elsewhere"
                                            32,500 with a KV connector: so many of each of 13 kinds
"""

import contextlib
import os
import random
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quire_engine.kv_cache import STATE, KVCacheGroups
from quire_engine.kv_cache.groups import STATES_PER_REQUEST
from quire_engine.messages import EngineCoreOutput, ErrorCode, FinishReason, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.scheduler.slo_policy import SLOPolicy
from quire_engine.scheduler.step_time import StepLoad, StepTime
from quire_engine.slo import NO_TARGETS, SLOTargets
from quire_engine.structured_outputs_params import StructuredOutputsParams
from support.full import FULL
from support.kv_connectors import FakeConnector
from support.scheduling import (
    FakeModelRunner,
    RandomProposer,
    draft_always,
    draft_partly_right,
    make_request,
    make_scheduler,
    run_step,
    true_continuation,
    undisturbed_output,
)

NUM_SEQUENCES = int(os.environ.get("QUIRE_RANDOM_SEQUENCES", "4000" if FULL else "400"))
NUM_PARTS = 4
NUM_STORING = int(os.environ.get("QUIRE_RANDOM_LIVES", "400" if FULL else "60"))
"""Of each way of running steps with a KV connector."""
_KERNELS = find_spec("quire_kernels")  # which is not imported, as it brings torch
HAS_MEMORY = (
    _KERNELS is not None
    and _KERNELS.origin is not None
    and any(Path(_KERNELS.origin).parent.glob("_cpu*.so"))
    and os.environ.get("QUIRE_CPU_KERNELS", "") not in ("torch", "triton")
)
NUM_OF_KIND = 300 if FULL else 60
"""Of each other way of running steps."""
MOST_LIVES = 300
"""In which everything has occurred: with drafts, windows, or steps in flight beside a store some outcomes are rare."""
MAX_MODEL_LEN = 24


TARGETS = [
    None,
    SLOTargets(ttft_ms=40),
    SLOTargets(ttft_ms=15, tpot_ms=3, on_overload="best_effort"),
    SLOTargets(tpot_ms=8, e2e_ms=100),
]
"""Objectives that some requests miss: a step takes about 2 ms and 1 ms per prompt token."""


def teach(costs: StepTime) -> None:
    """As many steps as it takes to be sure."""
    for number in range(24):
        load = StepLoad(number % 5, number % 3)
        costs.record(load, 0.002 + 0.001 * load.num_prompt_tokens + 0.0005 * load.num_rows)
    assert costs.is_confident


class AnythingGoes:
    """A grammar without an end that allows every token, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        self.seen += token_ids
        return True

    def fill_behind(self, drafts: Sequence[int], bitmask: npt.NDArray[np.int32], first_row: int) -> int:
        raise NotImplementedError

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        raise NotImplementedError

    def is_terminated(self) -> bool:
        return False


class Follower(FakeModelRunner):
    """A rank that does not sample: it knows only the tokens that it is told of. With steps ahead the one that samples
    tells it at once which token the next step goes on after; but not of a request with drafts in that step. The tokens
    of all requests that are drafted for, the scheduler tells again."""

    scheduler: Scheduler

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_told: dict[str, int] = {}
        """By request, the tokens that the scheduler told of."""

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        super().submit(scheduler_output)
        result = self._results[-1]
        if isinstance(result, ModelRunnerOutput):
            for request_id, token_ids in result.sampled_token_ids.items():
                if not self.scheduler.async_scheduling or request_id in scheduler_output.draft_token_ids:
                    del self._requests[request_id].token_ids[-len(token_ids) :]

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_states(scheduler_output)
        for request in scheduler_output.new_requests:
            self._num_told[request.request_id] = len(request.token_ids)
        cached = scheduler_output.cached_requests
        if cached.new_token_ids or not self.scheduler.async_scheduling:
            for request_id, token_ids in zip(cached.request_ids, cached.new_token_ids, strict=True):
                start, known = self._num_told[request_id], self._requests[request_id].token_ids
                assert known[start : start + len(token_ids)] == token_ids[: max(len(known) - start, 0)]
                known[start : start + len(token_ids)] = token_ids
                self._num_told[request_id] = start + len(token_ids)


class Life:
    """One scheduler with settings drawn at random, and a ledger of what each request must end with.

    Args:
        seed: of everything that is drawn.
        num_batches: steps that may be in flight. Each is executed when its result is taken in: the later ones have
            been scheduled before that.
        ahead: whether they are steps of one worker that follow on from each other's tokens, and not the stages' of a
            pipeline. Then each is executed when it is submitted.
        drafts: who drafts tokens: the scheduler's `proposer`, the `workers`, or nobody.
        windows: whether there are several groups of layers, or one that sees a window.
        stores: whether a KV connector keeps blocks, whose loads fail, come late, or come when the request has gone;
            some requests claim that another engine has kept theirs.
        in_memory: whether these are in shared memory, which may have room for two, and not in a dictionary.
        states: whether layers keep states, of which there may be too few for all requests.
    """

    def __init__(
        self,
        seed: int,
        num_batches: int = 1,
        ahead: bool = False,
        drafts: str | None = None,
        windows: bool = False,
        stores: bool = False,
        in_memory: bool = False,
        states: bool = False,
    ) -> None:
        self.num_batches = num_batches
        self.ahead = ahead
        self.in_flight: deque[SchedulerOutput] = deque()
        self.random = rng = random.Random(seed)
        self.now = 0.0
        threshold = rng.choice([0, 0, 3, 6])
        block_size = rng.choice([1, 2, 4])
        settings: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": -(-MAX_MODEL_LEN // block_size) + rng.randrange(8),
            "enable_prefix_caching": rng.random() < 0.8 or stores,
            "scheduling_policy": rng.choice(["fcfs", "priority", "slo"]),
            "max_num_seqs": rng.randrange(1, 6),
            "max_num_batched_tokens": rng.choice([1, 4, 9, 32]),
            "long_prefill_token_threshold": threshold,
            "max_queued_requests": rng.choice([None, None, 0, 2, 6]),
            "max_queue_delay_ms": rng.choice([None, None, 30.0]),
        }
        if windows:
            groups = KVCacheGroups(rng.choice([(3,), (9,), (None, 3), (None, 1, 6), (None, None, 5, 5), (2, 7)]))
            needed = groups.max_blocks(MAX_MODEL_LEN, block_size, settings["max_num_batched_tokens"])
            settings |= {"windows": groups.windows, "num_blocks": needed + rng.randrange(16)}
        if states:
            windows_of = rng.choice([(None, STATE), (None, STATE), (STATE,), (None, 3, STATE), (5, STATE)])
            groups, most = KVCacheGroups(windows_of), settings["max_num_batched_tokens"]
            needed = max(groups.max_blocks(MAX_MODEL_LEN, block_size, most), STATES_PER_REQUEST)
            settings |= {
                "windows": groups.windows, "num_blocks": needed + rng.randrange(16),
                "snapshot_blocks": rng.choice([1, 2, 3]), "num_states": STATES_PER_REQUEST + rng.randrange(12),
            }  # fmt: skip
        self.scheduler = make_scheduler(
            clock=lambda: self.now,
            pipeline_parallel_size=1 if ahead else num_batches,
            async_scheduling=ahead,
            sends_new_token_ids=num_batches > 1,
            fill_bitmask=self.fill_bitmask,
            **settings,
        )
        if isinstance(self.scheduler.policy, SLOPolicy):
            teach(self.scheduler.policy.costs)
        self.workers_draft = drafts == "workers"
        if drafts is not None:
            proposer = None if self.workers_draft else RandomProposer(rng, true_continuation)
            draft_always(self.scheduler, proposer, propose_seconds=rng.choice([0.0, 1.5]))
        self.runners = [FakeModelRunner.for_scheduler(self.scheduler, self.is_poisoned)]
        if num_batches > 1:
            follower = Follower.for_scheduler(self.scheduler, self.is_poisoned)
            assert isinstance(follower, Follower)
            follower.scheduler = self.scheduler
            self.runners.append(follower)
        for runner in self.runners:
            runner.draft = draft_partly_right
        self.connector: FakeConnector | None = None
        if stores:
            self.connector = FakeConnector(
                self.scheduler, self.runners, rng, lambda: self.now, staged_blocks=rng.choice([1, 3, 1000]),
                share_of_lies=rng.choice([0.0, 0.2]), share_of_failures=rng.choice([0.0, 0.2]), load_timeout_s=0.03,
                memory_slots=rng.choice([2, 10, 500]) if in_memory else None,
            )  # fmt: skip
        self.poison: dict[str, int] = {}
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}
        self.streamed: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}
        self.aborted: set[str] = set()
        self.grammars: dict[str, AnythingGoes] = {}
        self.counts = dict.fromkeys(["preempted", "refused", "deadline", "shared", "failed", "together", "compiled"], 0)
        if num_batches > 1:
            self.counts |= {"overlapping": 0, "void": 0}
        self.num_wasted: dict[str, int] = {}
        """Tokens that were sampled for a request after its end."""
        if ahead:
            self.counts |= {"wasted": 0, "unknown": 0}
        if ahead and drafts is not None:
            self.counts |= {"rested": 0}
        if stores:
            self.counts |= {"saved": 0, "loaded": 0, "not loaded": 0, "gone": 0}
        if drafts is not None:
            self.counts |= {"accepted": 0, "rejected": 0, "without": 0, "cut": 0}
        if self.workers_draft:
            self.counts |= {"wanted": 0}
        self._prefixes = [[rng.randrange(64) for _ in range(12)] for _ in range(2)]

    def is_poisoned(self, request_id: str, num_output_tokens: int) -> bool:
        return self.poison.get(request_id) == num_output_tokens

    def fill_bitmask(
        self, requests: Sequence[Request], drafts: Mapping[str, Sequence[int]]
    ) -> tuple[None, list[tuple[Request, int]], list[Any]]:
        """Grammars that allow only the first drafts, or none, of some requests."""
        cut = [
            (request, self.random.randrange(len(own)))
            for request in requests
            if (own := drafts.get(request.request_id)) and self.random.random() < 0.5
        ]
        if cut:
            self.counts["cut"] += len(cut)
        return None, cut, []

    def add(self) -> None:
        """One request, or a group with the same prompt, as n > 1 makes it."""
        rng = self.random
        prompt = rng.choice(self._prefixes)[: rng.randrange(13)] + [
            rng.randrange(64) for _ in range(rng.randrange(1, 5))
        ]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 6, None]),
            priority=rng.choice([0, 0, 1, -1]) if self.scheduler.config.scheduling_policy == "priority" else 0,
            cache_salt=rng.choice([None, None, "tenant"]),
            structured_outputs=StructuredOutputsParams(regex=".*") if rng.random() < 0.2 else None,
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.0]) if self.ahead else 0.0,
            num_speculative_tokens=rng.choice([None, None, 0, 2]),
        )
        deadline_ms = rng.choice([None, None, None, 20.0, 90.0])
        slo_targets = rng.choice(TARGETS) if self.scheduler.config.scheduling_policy == "slo" else None
        for _ in range(rng.choice([1, 1, 3])):
            request = make_request(
                prompt,
                request_id=f"r{len(self.expected)}",
                params=params,
                eos_token_ids=[2],
                max_model_len=MAX_MODEL_LEN,
            )
            request.options, request.slo_targets = RequestOptions(deadline_ms=deadline_ms), slo_targets or NO_TARGETS
            request.was_prefilled = self.connector is not None and rng.random() < 0.3  # and not always truly
            self.expected[request.request_id] = undisturbed_output(request)
            self.streamed[request.request_id] = []
            if rng.random() < 0.03:
                self.poison[request.request_id] = rng.randrange(3)
            self.scheduler.add_request(request)

    def abort(self) -> None:
        if self.scheduler.requests:
            request_id = self.random.choice(sorted(self.scheduler.requests))
            if self.connector is not None:
                self.counts["gone"] += self.scheduler.requests[request_id] in self.connector.scheduler.loading
            assert self.scheduler.finish_request(request_id) is not None
            assert self.scheduler.kv_cache.get_block_ids(request_id) == []
            self.aborted.add(request_id)

    def grammar_is_ready(self) -> None:
        """One of those that are being compiled."""
        waiting = sorted(self.scheduler.waiting_for_fsm, key=lambda request: request.arrival)
        if waiting:
            request = self.random.choice(waiting)
            request.grammar = AnythingGoes()
            self.grammars[request.request_id] = request.grammar
            self.scheduler.grammar_is_ready(request)

    def step(self) -> None:
        """One step of an engine, with an abort or a reset of the cache while it runs, at times."""
        scheduler = self.scheduler
        while len(self.in_flight) < self.num_batches and (not self.in_flight or scheduler.has_requests()):
            scheduler_output = self._schedule()
            if self.in_flight and not (
                scheduler_output.num_scheduled_tokens
                or scheduler_output.dropped_request_ids
                or scheduler_output.kv_connector_metadata
            ):
                break
            self.in_flight.append(scheduler_output)
            if self.ahead:
                for runner in self.runners:
                    runner.submit(scheduler_output)
        scheduler_output = self.in_flight.popleft()
        try:
            runner_output = self._execute(scheduler_output)
        except RuntimeError as error:
            self.counts["failed"] += 1
            self._drop_in_flight()
            self._take(scheduler.recover_from_failed_step(scheduler_output, str(error)))
            return
        if self.random.random() < 0.1:
            self.abort()
            scheduler.check_integrity()
        if self.random.random() < 0.05:
            scheduler.kv_cache.reset_prefix_cache()
        self._count_void(scheduler_output, runner_output)
        for request_id, token_ids in scheduler_output.draft_token_ids.items():
            num_accepted = len(runner_output.sampled_token_ids[request_id]) - 1
            self.counts["accepted"] += num_accepted
            self.counts["rejected"] += len(token_ids) - num_accepted
        self._take(scheduler.update_from_output(scheduler_output, runner_output))
        self.counts["together"] += len(scheduler_output.num_scheduled_tokens) > 1

    def _schedule(self) -> SchedulerOutput:
        scheduler = self.scheduler
        first = scheduler.running[0] if scheduler.running else None
        num_preemptions = first.num_preemptions if first else 0
        isolated = scheduler._isolation.isolated
        scheduler_output = scheduler.schedule()
        self._check_drafts(scheduler_output)
        scheduler.check_integrity()
        scheduled = scheduler_output.num_scheduled_tokens
        if not self.in_flight:
            num_held = len(scheduler.waiting_for_fsm)
            num_held += len(self.connector.scheduler.loading) if self.connector is not None else 0
            metadata = scheduler_output.kv_connector_metadata
            if metadata is None or not metadata.placements or scheduled:
                assert bool(scheduled) == (len(scheduler.requests) > num_held), "no progress"
            # Else loaded blocks are filed, and nobody has room besides them before the step's end, which lets them go.
        assert sum(scheduled.values()) <= scheduler.config.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        if first is not None and first.request_id in scheduler.requests:
            assert first.num_preemptions == num_preemptions, "the first in the order gave way"
        if isolated is not None and scheduler._isolation.isolated is isolated:
            assert set(scheduled) <= {isolated.request_id}, "not alone in isolation"
        self._check_partial_prefills()
        if "without" in self.counts:
            self.counts["without"] += any(not request.is_drafted for request in scheduler.running)
        for request in scheduler.running:
            if request.is_drafted:
                own = [
                    len(step.draft_token_ids.get(request.request_id, ()))
                    for step in (*self.in_flight, scheduler_output)
                ]
                num_unknown = request.num_computed_tokens - request.num_tokens - sum(own)
                if num_unknown > 0:
                    has_to_wait = request.needs_token_values or scheduler._isolation.isolated is request
                    assert self.ahead, "computed from what is not known yet"
                    assert not has_to_wait, "computed from what the host has to know"
                    assert not any(own), "behind drafts whose fate is unknown, or drafts behind what is not known"
                    self.counts["rested"] += 1
                assert sum(map(bool, own)) <= 1, "behind drafts whose fate is unknown"
            elif request.needs_token_values or scheduler._isolation.isolated is request or not self.ahead:
                assert request.num_computed_tokens <= request.num_tokens, "computed from what is not known yet"
            elif "unknown" in self.counts:
                self.counts["unknown"] += request.num_computed_tokens > request.num_tokens
        return scheduler_output

    def _check_drafts(self, scheduler_output: SchedulerOutput) -> None:
        """None is at or behind the end of the output, and no request has more of them than it asked for."""
        drafts, wanted = scheduler_output.draft_token_ids, scheduler_output.num_drafts_wanted
        for request_id in {**drafts, **wanted}:
            request, own = self.scheduler.requests[request_id], len(drafts.get(request_id, ()))
            num_unknown = len([step for step in self.in_flight if request_id in step.num_scheduled_tokens])
            is_ahead = request.num_computed_tokens > request.num_tokens + own
            left = request.max_tokens - request.num_output_tokens - own - 1 - (num_unknown if is_ahead else 0)
            assert left >= 0
            assert wanted.get(request_id, 0) <= max(left - 1, 0)
            most = request.sampling_params.num_speculative_tokens
            assert most is None or max(own, wanted.get(request_id, 0)) <= most
        if "wanted" in self.counts:
            self.counts["wanted"] += len(wanted)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """All ranks come to the same; they fail together, too."""
        first, *others = self.runners
        if not self.ahead:
            for runner in self.runners:
                runner.submit(scheduler_output)
        try:
            output = first.collect()
        except RuntimeError:
            for other in others:
                with pytest.raises(RuntimeError):
                    other.collect()
            raise
        assert all(other.collect() == output for other in others)
        return output

    def _drop_in_flight(self) -> None:
        """Nobody cares what comes of these: after a failure the cache may hold anything."""
        while self.in_flight:
            scheduler_output = self.in_flight.popleft()
            if self.ahead:
                for runner in self.runners:
                    with pytest.raises(RuntimeError):  # like all steps behind one that failed
                        runner.collect()
                continue
            for runner in self.runners:
                with contextlib.suppress(RuntimeError, AssertionError):
                    runner.execute_model(scheduler_output)

    def _count_void(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        if self.num_batches > 1:
            requests = [self.scheduler.requests.get(request_id) for request_id in runner_output.sampled_token_ids]
            self.counts["void"] += sum(
                request is not None and request.last_stale_step >= scheduler_output.step for request in requests
            )
            self.counts["overlapping"] += bool(self.in_flight)
        for request_id in runner_output.sampled_token_ids:
            if request_id not in self.scheduler.requests:
                self.num_wasted[request_id] = self.num_wasted.get(request_id, 0) + 1

    def _check_partial_prefills(self) -> None:
        running, config = self.scheduler.running, self.scheduler.config
        postponed = self.num_batches > 1  # a decode may wait for the next batch
        partial = [request for request in running if request.num_tokens - request.num_computed_tokens > postponed]
        if config.scheduling_policy != "slo":  # there some may pause
            assert len(partial) <= 1
        keys = [(request.sampling_params.priority, request.arrival) for request in running]
        assert config.scheduling_policy != "priority" or keys == sorted(keys), "running is out of order"

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "heard of after its end"
            assert output.request_id not in self.aborted, "heard of after its end"
            self.streamed[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output

    def operate(self) -> None:
        """Any one operation."""
        if self.connector is not None:
            self.connector.go_on(0.4)
        kind = self.random.choices(["add", "abort", "step", "compile", "reset", "wait"], [4, 1, 7, 1, 0.5, 1])[0]
        if kind == "add":
            self.add()
        elif kind == "abort":
            self.abort()
        elif kind == "step":
            self.step()
        elif kind == "compile":
            self.grammar_is_ready()
        elif kind == "reset":
            self.scheduler.kv_cache.reset_prefix_cache()
        else:
            self.now += self.random.choice([0.001, 0.02, 0.05])
        self.scheduler.check_integrity()

    def finish(self) -> None:
        """Step until nobody is left, and check what each got."""
        for _ in range(3000):
            self.grammar_is_ready()
            if self.connector is not None:
                self.connector.go_on(0.7)
                self.now += 0.001
            if not self.scheduler.has_requests() and not self.in_flight:
                if not self.scheduler.requests:
                    break
                continue
            self.step()
            self.scheduler.check_integrity()
        assert not self.scheduler.has_requests(), "it never ends"
        assert set(self.ended) | self.aborted == set(self.expected)
        for request_id, (tokens, reason) in self.expected.items():
            got = self.streamed[request_id]
            assert got == tokens[: len(got)]
            if request_id in self.grammars:
                assert self.grammars[request_id].seen == got
            output = self.ended.get(request_id)
            if output is None or output.error_code is ErrorCode.DEADLINE:
                continue
            if output.error_code is ErrorCode.UNAVAILABLE:
                assert got == [], "refused after it ran"
            elif output.finish_reason is FinishReason.ERROR:
                assert len(got) == self.poison[request_id]
            else:
                assert (got, output.finish_reason) == (tokens, reason)
            num_wasted = self.num_wasted.get(request_id, 0)
            if output.finish_reason is FinishReason.STOP and self.ahead:
                assert num_wasted < self.num_batches
                self.counts["wasted"] += num_wasted
            else:
                assert num_wasted == 0, "its end was known"
        stats = self.scheduler.make_stats()
        assert stats.num_blocks_used == 0
        if self.connector is not None:
            self.connector.close()
        if stats.kv_connector is not None:
            self.counts["saved"] = stats.kv_connector.num_saved_blocks
            self.counts["loaded"] = stats.kv_connector.num_loaded_blocks
            self.counts["not loaded"] = stats.kv_connector.num_failed_blocks
        self.counts["compiled"] = len(self.grammars)
        self.counts["preempted"] = stats.num_preemptions
        self.counts["shared"] = stats.prefix_cache_hits
        codes = [output.error_code for output in self.ended.values()]
        self.counts["refused"] = codes.count(ErrorCode.UNAVAILABLE)
        self.counts["deadline"] = codes.count(ErrorCode.DEADLINE)


def live(num_lives: int, first_seed: int = 0, **arguments: Any) -> None:
    """So many lives, and more until everything has occurred."""
    totals: dict[str, int] = {}
    for seed in range(first_seed, first_seed + max(num_lives, MOST_LIVES)):
        if seed >= first_seed + num_lives and min(totals.values()):
            break
        life = Life(seed, **arguments)
        try:
            for _ in range(life.random.randrange(4, 16)):
                life.operate()
            life.finish()
        except Exception as error:
            raise AssertionError(f"Life({seed}, **{arguments}) shows it again: {error}") from error
        for name, number in life.counts.items():
            totals[name] = totals.get(name, 0) + number
    assert min(totals.values()), f"too quiet to show anything: {totals}"


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_books_balance_after_every_operation_of_random_sequences(part: int) -> None:
    size = NUM_SEQUENCES // NUM_PARTS
    live(size, first_seed=part * size)


@pytest.mark.parametrize("num_batches", [2, 3, 4])
def test_books_balance_with_several_batches_in_flight(num_batches: int) -> None:
    live(NUM_OF_KIND, num_batches=num_batches)


@pytest.mark.parametrize("num_batches", [2, 3])
def test_books_balance_with_steps_ahead(num_batches: int) -> None:
    live(NUM_OF_KIND, num_batches=num_batches, ahead=True)


@pytest.mark.parametrize("drafts", ["proposer", "workers"])
@pytest.mark.parametrize(("num_batches", "ahead"), [(1, False), (2, False), (2, True)])
def test_books_balance_with_drafts(num_batches: int, ahead: bool, drafts: str) -> None:
    live(NUM_OF_KIND, num_batches=num_batches, ahead=ahead, drafts=drafts)


@pytest.mark.parametrize(("num_batches", "ahead"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("drafts", [None, "proposer", "workers"])
def test_books_balance_with_windows(num_batches: int, ahead: bool, drafts: str | None) -> None:
    live(NUM_OF_KIND, num_batches=num_batches, ahead=ahead, drafts=drafts, windows=True)


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize(
    ("num_batches", "ahead", "drafts"),
    [(1, False, None), (1, False, "proposer"), (3, False, "workers"), (2, True, None), (2, True, "proposer")],
)
def test_books_balance_with_states(num_batches: int, ahead: bool, drafts: str | None, stores: bool) -> None:
    live(NUM_OF_KIND, num_batches=num_batches, ahead=ahead, drafts=drafts, stores=stores, states=True)


@pytest.mark.parametrize("windows", [False, True])
def test_books_balance_with_blocks_that_are_kept_elsewhere(windows: bool) -> None:
    live(NUM_STORING, windows=windows, stores=True)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("num_batches", "ahead", "drafts"), [(3, False, None), (2, True, None), (2, True, "proposer")])
def test_books_balance_with_blocks_elsewhere_and_steps_in_flight(
    num_batches: int, ahead: bool, drafts: str | None, windows: bool
) -> None:
    live(NUM_STORING, num_batches=num_batches, ahead=ahead, drafts=drafts, windows=windows, stores=True)


@pytest.mark.skipif(not HAS_MEMORY, reason="memory needs the C++ kernels")
@pytest.mark.parametrize(
    ("num_batches", "ahead", "drafts", "windows"),
    [
        (1, False, None, False),
        (1, False, None, True),
        (3, False, None, False),
        (2, True, None, False),
        (2, True, "proposer", False),
    ],
)
def test_books_balance_with_blocks_elsewhere_in_shared_memory(
    num_batches: int, ahead: bool, drafts: str | None, windows: bool
) -> None:
    kind: dict[str, Any] = {"num_batches": num_batches, "ahead": ahead, "drafts": drafts, "windows": windows}
    live(NUM_STORING, **kind, stores=True, in_memory=True)


def test_group_with_one_prompt_holds_its_full_blocks_once() -> None:
    def blocks_used(group: list[Request], enable_prefix_caching: bool) -> int:
        scheduler = make_scheduler(num_blocks=256, block_size=4, enable_prefix_caching=enable_prefix_caching)
        runner = FakeModelRunner.for_scheduler(scheduler)
        for request in group:
            scheduler.add_request(request)
        run_step(scheduler, runner)
        scheduler.check_integrity()
        return scheduler.make_stats().num_blocks_used

    def group(size: int) -> list[Request]:
        return [make_request(range(63)) for _ in range(size)]

    alone = blocks_used(group(1), True)
    assert alone == 16
    assert blocks_used(group(8), True) == 15 + 8 * 1, "15 full blocks, once; one of its own each"
    assert blocks_used(group(8), False) == 8 * alone
