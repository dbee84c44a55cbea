"""What drafts may take of a step, and what a proposer cannot do to it."""

from collections.abc import Sequence

import pytest
from quire_engine.messages import FinishReason
from quire_engine.scheduler import Scheduler
from quire_engine.scheduler.request import Request
from support.scheduling import (
    VOCAB_SIZE,
    FakeModelRunner,
    make_request,
    make_requests,
    make_scheduler,
    run_step,
    true_continuation,
    undisturbed_output,
)


class Proposer:
    """Drafts these tokens for everybody, or what comes next."""

    def __init__(self, token_ids: Sequence[int] | None = None) -> None:
        self.token_ids = token_ids

    def drafts_for(self, request: Request) -> bool:
        return True

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        return true_continuation(request, max_tokens) if self.token_ids is None else list(self.token_ids)


class Raises(Proposer):
    """At one of the two questions."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question
        self.num_asked = 0

    def drafts_for(self, request: Request) -> bool:
        if self.question == "drafts_for":
            raise RuntimeError(self.question)
        return True

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        self.num_asked += 1
        raise RuntimeError("propose")


def drafting(proposer: Proposer, num_requests: int = 1, max_tokens: int = 9, **settings: int) -> Scheduler:
    """A scheduler whose requests have a token each."""
    scheduler = make_scheduler(**settings)
    scheduler.draft_with(proposer, VOCAB_SIZE)
    for request in make_requests(num_requests, max_tokens=max_tokens):
        scheduler.add_request(request)
    return scheduler


def run(scheduler: Scheduler, runner: FakeModelRunner | None = None) -> dict[str, list[int]]:
    """What each request gets, until all have ended."""
    runner = runner or FakeModelRunner.for_scheduler(scheduler)
    token_ids: dict[str, list[int]] = {request_id: [] for request_id in scheduler.requests}
    while scheduler.has_requests():
        for output in run_step(scheduler, runner):
            assert output.finish_reason is not FinishReason.ERROR
            token_ids[output.request_id] += output.new_token_ids
        scheduler.check_integrity()
    return token_ids


@pytest.mark.parametrize("question", ["drafts_for", "propose"])
def test_a_proposer_that_raises_is_not_asked_again_and_nobody_notices(question: str) -> None:
    proposer = Raises(question)
    scheduler = drafting(proposer, 3)
    expected = {name: undisturbed_output(request)[0] for name, request in scheduler.requests.items()}
    assert run(scheduler) == expected
    assert proposer.num_asked == (3 if question == "propose" else 0)


@pytest.mark.parametrize("outside", [VOCAB_SIZE, -1])
def test_a_draft_ends_before_what_is_no_token(outside: int) -> None:
    scheduler = drafting(Proposer([5, outside, 6]))
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert scheduler.schedule().draft_token_ids == {"r0": [5]}


def test_drafts_take_what_is_left_of_the_tokens_and_rows_and_no_more() -> None:
    scheduler = drafting(Proposer([7] * 20), 2, max_tokens=30, max_num_batched_tokens=16, max_num_seqs=8)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    scheduler.add_request(make_request([50] * 9, request_id="new"))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r0": 1 + 5, "r1": 1, "new": 9}, "8 rows; 3 are taken"
    scheduler = drafting(Proposer([7] * 20), 1, max_tokens=4)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 1 + 2}, "the last token is sampled behind the last draft"


def test_nobody_gives_way_in_a_step_for_its_drafts() -> None:
    scheduler = drafting(Proposer([7] * 8), 2, max_tokens=9, num_blocks=6, block_size=4)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    step = scheduler.schedule()
    assert set(step.num_scheduled_tokens) == {"r0", "r1"}
    assert scheduler.num_preemptions == 0
    assert list(step.draft_token_ids) == ["r0"] or not step.draft_token_ids


def test_a_request_that_is_isolated_has_no_drafts() -> None:
    """It is to fail for itself: a step that fails because of drafts ends no request."""
    scheduler = drafting(Proposer(), 3)
    expected = {name: undisturbed_output(request)[0] for name, request in scheduler.requests.items()}
    failed: list[str] = []

    class Runner(FakeModelRunner):
        def submit(self, scheduler_output):  # type: ignore[no-untyped-def]
            if scheduler_output.draft_token_ids and len(failed) < 3:
                failed.append("with drafts")
                self.fails = lambda request_id, num_output_tokens: True
            super().submit(scheduler_output)
            self.fails = lambda request_id, num_output_tokens: False

    assert run(scheduler, Runner.for_scheduler(scheduler)) == expected
    assert len(failed) == 3
