"""The scheduler under whatever may happen, for many steps: no request, block or token is lost or mixed up."""

import random
from typing import Any

import pytest
from quire_engine.kv_cache import STATE
from quire_engine.messages import EngineCoreOutput, FinishReason
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request, RequestStatus
from support.full import FULL
from support.scheduling import FakeModelRunner, make_request, make_scheduler, run_step, undisturbed_output

NUM_STEPS = 2000 if FULL else 1000
MAX_MODEL_LEN = 40

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64},
    "tight": {"num_blocks": 20, "block_size": 2, "max_num_seqs": 6, "max_num_batched_tokens": 16},
    "chunked": {"num_blocks": 10, "block_size": 4, "max_num_batched_tokens": 32, "long_prefill_token_threshold": 5},
    "token-blocks": {"num_blocks": 40, "block_size": 1, "max_num_seqs": 5, "max_num_batched_tokens": 3},
    "uncached": {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 20, "enable_prefix_caching": False},
    "states": {
        "num_blocks": 30,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "windows": (None, STATE),
        "snapshot_blocks": 2,
        "num_states": 9,
    },
    "states-alone": {
        "num_blocks": 7,
        "block_size": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 9,
        "windows": (STATE,),
        "snapshot_blocks": 3,
    },
    "one-token-steps": {"num_blocks": 3, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 1},
}


class History:
    """One scheduler and one worker; clients that come, go and send poison; and a ledger of what each must end with."""

    def __init__(self, seed: int, settings: dict[str, Any], failures: bool) -> None:
        self.random = random.Random(seed)
        self.failures = failures
        self.scheduler = make_scheduler(**settings)
        self.runner = FakeModelRunner.for_scheduler(self.scheduler, self._fails)
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}
        self.streamed: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.poison: dict[str, int] = {}
        self.num_failed_steps = 0
        self._transient = False
        self._prefixes = [[self.random.randrange(64) for _ in range(24)] for _ in range(3)]

    def _fails(self, request_id: str, num_output_tokens: int) -> bool:
        return self._transient or self.poison.get(request_id) == num_output_tokens

    def add(self) -> None:
        """A request that may share its beginning with others, end early, or make its n-th step fail."""
        number = len(self.expected)
        prompt = self.random.choice(self._prefixes)[: self.random.randrange(25)]
        prompt = prompt + [self.random.randrange(64) for _ in range(self.random.randrange(1, 12))]
        params = SamplingParams(
            max_tokens=self.random.choice([1, 3, 10, 30, None]),
            stop_token_ids=self.random.choice([[], [5]]),
            ignore_eos=self.random.random() < 0.3,
        )
        request = make_request(
            prompt, request_id=f"r{number}", params=params, eos_token_ids=[2], max_model_len=MAX_MODEL_LEN
        )
        self.expected[request.request_id] = undisturbed_output(request)
        self.streamed[request.request_id] = []
        if self.failures and self.random.random() < 0.1:
            self.poison[request.request_id] = self.random.randrange(4)
        self.scheduler.add_request(request)

    def abort_somebody(self) -> None:
        if self.scheduler.requests:
            request_id = self.random.choice(sorted(self.scheduler.requests))
            request = self.scheduler.finish_request(request_id)
            assert request is not None
            assert request.status is RequestStatus.FINISHED
            assert self.scheduler.kv_cache.get_block_ids(request_id) == []
            self.ended[request_id] = FinishReason.ABORT
            self.scheduler.check_integrity()

    def step(self, abort: bool = False) -> None:
        """One step, checked from all sides; perhaps somebody is aborted while it runs."""
        scheduler, config = self.scheduler, self.scheduler.config
        running = list(scheduler.running)
        preempted_before = {request.request_id: request.num_preemptions for request in running}
        scheduler_output = scheduler.schedule()
        scheduler.check_integrity()

        scheduled = scheduler_output.num_scheduled_tokens
        assert bool(scheduled) == scheduler.has_requests(), "no progress"
        assert sum(scheduler_output.num_scheduled_tokens.values()) <= config.max_num_batched_tokens
        if config.long_prefill_token_threshold:
            assert max(scheduled.values(), default=0) <= config.long_prefill_token_threshold
        assert len(scheduler.running) <= config.max_num_seqs
        if running:
            assert scheduler.running[0] is running[0], "the oldest gave way"
            assert running[0].request_id in scheduled, "the oldest got nothing"
        preempted = [request for request in running if request.num_preemptions > preempted_before[request.request_id]]
        assert preempted == running[len(running) - len(preempted) :], "somebody older than others gave way"

        self._transient = self.failures and len(scheduled) > 1 and self.random.random() < 0.02
        try:
            runner_output = self.runner.execute_model(scheduler_output)
        except RuntimeError as error:
            self.num_failed_steps += 1
            self._take(scheduler.recover_from_failed_step(scheduler_output, str(error)))
        else:
            if abort:
                self.abort_somebody()
            self._take(scheduler.update_from_output(scheduler_output, runner_output))
        assert len(self.runner.known_request_ids) <= config.max_num_seqs, "more than the worker has slots for"
        scheduler.check_integrity()

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "heard of after its end"
            self.streamed[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def check_what_each_got(self) -> None:
        """Everybody's tokens are those of an undisturbed run, as far as they came; only poison ends in an error."""
        assert set(self.ended) == set(self.expected)
        for request_id, (tokens, reason) in self.expected.items():
            got, ended = self.streamed[request_id], self.ended[request_id]
            assert got == tokens[: len(got)]
            if ended is FinishReason.ERROR:
                assert len(got) == self.poison[request_id]
            elif ended is not FinishReason.ABORT:
                assert (got, ended) == (tokens, reason)
                assert self.poison.get(request_id, len(tokens)) >= len(tokens), "poison did not work"


@pytest.mark.parametrize("failures", [False, True], ids=["calm", "failures"])
@pytest.mark.parametrize("name", SETTINGS)
def test_any_history_keeps_the_books_and_the_tokens(name: str, failures: bool) -> None:
    history = History(seed=7, settings=SETTINGS[name], failures=failures)
    for _ in range(NUM_STEPS):
        while history.random.random() < 0.35 and len(history.scheduler.requests) < 15:
            history.add()
        if history.random.random() < 0.05:
            history.abort_somebody()
        if history.random.random() < 0.01:
            history.scheduler.kv_cache.reset_prefix_cache()
        history.step(abort=history.random.random() < 0.05)
    for _ in range(20_000):
        if not history.scheduler.has_requests():
            break
        history.step()
    history.check_what_each_got()
    assert history.scheduler.make_stats().num_blocks_used == 0
    assert len(history.expected) >= 100, "too quiet to show anything"
    assert failures == (history.num_failed_steps > 0)
    assert failures == (FinishReason.ERROR in history.ended.values())


def test_histories_meet_what_they_are_meant_to_meet() -> None:
    """Preemptions and prefix hits occur in them, or else they would show little."""
    history = History(seed=1, settings=SETTINGS["tight"], failures=False)
    while history.scheduler.num_preemptions == 0 or history.scheduler.prefix_cache_hits == 0:
        assert history.runner.num_steps < 1000
        while len(history.scheduler.requests) < 10:
            history.add()
        history.step()


def make_twins(num_requests: int) -> list[Request]:
    return [
        make_request(range(9), request_id=f"twin{i}", params=SamplingParams(max_tokens=5)) for i in range(num_requests)
    ]


def test_equal_prompts_get_equal_outputs_whatever_they_share() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    runner = FakeModelRunner.for_scheduler(scheduler)
    twins = make_twins(6)
    for twin in twins:
        scheduler.add_request(twin)
    while scheduler.has_requests():
        run_step(scheduler, runner)
        scheduler.check_integrity()
    assert len({tuple(twin.all_token_ids) for twin in twins}) == 1
    assert scheduler.prefix_cache_hits > 0
