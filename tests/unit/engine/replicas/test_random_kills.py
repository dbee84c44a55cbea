"""Engines are killed from outside at random moments, in simulated time: no request is blamed for it."""

import random
from dataclasses import dataclass, field

import pytest
from quire_engine.core.journal import Journal
from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire_engine.sampling_params import SamplingParams

NUM_KILLS = 100
NUM_LIVE = 16
START_SECONDS = 2.8
STEP_SECONDS = 0.02
PREFILL_SECONDS = 0.05
GRAMMAR_SECONDS = 5.0
"""At most, until a structured request's grammar is there; every second request is one."""


@dataclass
class _Sent:
    """A request as the engine has it."""

    message: EngineCoreRequest
    number: int
    runs_from: float
    has_begun: bool = False
    num_tokens: int = 0


@dataclass
class Simulation:
    """One engine after the other, and a journal with always as many live requests."""

    seed: int
    counts_all: bool = False
    """Whether deaths count against all that was sent."""
    blamed: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now = 0.0
        self._journal = Journal(4096, lambda: self._now)
        self._num_requests = self._num_messages = 0
        for _ in range(NUM_LIVE):
            self._add()

    def _add(self) -> None:
        self._num_requests += 1
        kind = "structured" if self._num_requests % 2 else "free"
        params = SamplingParams(max_tokens=self._random.randint(20, 400))
        self._journal.add(EngineCoreRequest(f"{kind}-{self._num_requests}", [1, 2], params))

    def run(self) -> None:
        """Kill so many engines, whatever they are at, also while they start."""
        for _ in range(NUM_KILLS):
            killed_at = self._now + self._random.uniform(0.1, 9.0)
            self._live_until(killed_at)
            self._now = killed_at

    def _live_until(self, killed_at: float) -> None:
        self._now += START_SECONDS
        if self._now >= killed_at:
            return  # it dies before it is ready: it has no requests, and is no news to the journal
        sent: dict[str, _Sent] = {}
        while self._step(sent, killed_at):
            pass
        begun = {one.number for one in sent.values() if one.has_begun or self.counts_all}
        for request_id in self._journal.engine_died(begun.__contains__):
            self.blamed.append(request_id)
            self._journal.remove(request_id)
            self._add()

    def _step(self, sent: dict[str, _Sent], killed_at: float) -> bool:
        """Take in what is unsent and compute one token for all who can; False: the engine was killed."""
        for message in self._journal.take_unsent():
            waits = self._random.uniform(0, GRAMMAR_SECONDS) if message.request_id.startswith("structured") else 0.0
            self._num_messages += 1
            sent[message.request_id] = _Sent(message, self._num_messages, self._now + waits)
            self._journal.note_sent(message.request_id, self._num_messages)
        runnable = [
            one for one in sent.values() if one.runs_from <= self._now and one.message.request_id in self._journal
        ]
        runnable = [one for one in runnable if one.num_tokens < _limit(one.message)]
        self._now += STEP_SECONDS
        for one in runnable:
            self._now += 0.0 if one.has_begun else PREFILL_SECONDS
            one.has_begun = True
        if self._now >= killed_at:
            return False
        for one in runnable:
            one.num_tokens += 1
            self.num_tokens += 1
            reason = FinishReason.LENGTH if one.num_tokens == _limit(one.message) else None
            self._journal.note_outputs([EngineCoreOutput(one.message.request_id, [7], reason)])
            if one.message.request_id not in self._journal:
                self._add()
            elif reason is not None:  # its isolation is over: the engine gets it anew
                del sent[one.message.request_id]
        return True


def _limit(message: EngineCoreRequest) -> int:
    left = (message.sampling_params.max_tokens or 0) - len(message.output_token_ids)
    return left if message.max_new_tokens is None else min(left, message.max_new_tokens)


@pytest.mark.parametrize("seed", range(10))
def test_kills_from_outside_blame_nobody(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.run()
    print(f"seed {seed}: {simulation.num_tokens} tokens under {NUM_KILLS} kills, blamed: {simulation.blamed}")
    assert simulation.blamed == []
    assert simulation.num_tokens > 1000


def test_they_would_if_deaths_counted_against_who_only_waits() -> None:
    simulations = [Simulation(seed, counts_all=True) for seed in range(10)]
    for simulation in simulations:
        simulation.run()
    blamed = [request_id for simulation in simulations for request_id in simulation.blamed]
    assert blamed
    assert all(request_id.startswith("structured") for request_id in blamed)
