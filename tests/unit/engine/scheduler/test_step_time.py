"""What a step takes by what it computes: learned from a machine whose costs are known."""

from random import Random

import pytest
from quire_engine.messages import CachedRequestData, NewRequestData, SchedulerOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.step_time import StepLoad, StepTime


def true_seconds(load: StepLoad) -> float:
    """Of a machine that has these costs exactly."""
    return (
        0.008
        + 0.0006 * load.num_prompt_tokens
        + 0.0004 * load.num_rows
        + 2e-7 * load.context
        + 3e-8 * load.prompt_context
    )


def some_load(random: Random) -> StepLoad:
    rows, tokens = random.randrange(33), random.choice([0, 0, 0, random.randrange(2, 400)])
    return StepLoad(tokens, rows, rows * random.uniform(50, 900), tokens * random.uniform(tokens / 2, 900))


def learned(num_steps: int = 400, noise: float = 0.0, slow_share: float = 0.0) -> StepTime:
    """A model of that machine, which is off by a share, and at times much slower: others have its cores."""
    random, model = Random(1), StepTime()
    for _ in range(num_steps):
        load = some_load(random)
        slow = 20.0 if random.random() < slow_share else 1.0
        model.record(load, true_seconds(load) * random.uniform(1 - noise, 1 + noise) * slow)
    return model


UNSEEN = [StepLoad(512, 0, 0, 512 * 256), StepLoad(300, 20, 20 * 700, 300 * 800), StepLoad(0, 48, 48 * 500)]


@pytest.mark.parametrize(("noise", "slow_share", "within"), [(0.0, 0.0, 0.05), (0.2, 0.0, 0.1), (0.1, 0.05, 0.25)])
def test_steps_that_never_occurred_are_predicted(noise: float, slow_share: float, within: float) -> None:
    model = learned(noise=noise, slow_share=slow_share)
    assert model.is_confident
    assert [model.seconds(load) for load in UNSEEN] == pytest.approx(
        [true_seconds(load) for load in UNSEEN], rel=within
    )


def test_many_decodes_do_not_make_it_forget_what_prompts_cost() -> None:
    model = learned()
    for _ in range(3000):
        load = StepLoad(0, 8, 8 * 300)
        model.record(load, true_seconds(load))
    assert model.seconds(UNSEEN[0]) == pytest.approx(true_seconds(UNSEEN[0]), rel=0.05)


def test_machine_that_becomes_slower_is_followed() -> None:
    random, model = Random(2), learned()
    for _ in range(100):
        load = some_load(random)
        model.record(load, 2 * true_seconds(load))
    assert model.seconds(UNSEEN[1]) == pytest.approx(2 * true_seconds(UNSEEN[1]), rel=0.1)


def test_no_confidence_without_prompts_or_where_steps_take_anything() -> None:
    random = Random(3)
    model, erratic = StepTime(), StepTime()
    for _ in range(200):
        model.record(StepLoad(0, 8, 800), 0.01)
        erratic.record(some_load(random), random.choice([0.001, 1.0]))
    assert not StepTime().is_confident
    assert not model.is_confident
    assert not erratic.is_confident


def test_number_of_kinds_is_bounded() -> None:
    random, model = Random(4), StepTime()
    for _ in range(2000):
        load = StepLoad(*(random.randrange(2 ** random.randrange(20)) for _ in range(4)))
        model.record(load, true_seconds(load))
    assert len(model._kinds) <= 96
    assert model.seconds(UNSEEN[1]) == pytest.approx(true_seconds(UNSEEN[1]), rel=0.1)


def test_prompt_tokens_that_fit_into_a_time_take_that_time() -> None:
    model, rows = learned(), StepLoad(0, 10, 5000)
    tokens = model.prompt_tokens_within(0.2, rows, computed=600)
    load = rows._replace(num_prompt_tokens=round(tokens), prompt_context=round(tokens) * (600 + tokens / 2))
    assert model.seconds(load) == pytest.approx(0.2, rel=0.01)
    assert model.prompt_tokens_within(0.001, rows) < 0


def test_load_of_a_step_tells_prompts_drafts_and_next_tokens_apart() -> None:
    new = NewRequestData("new", [0] * 40, 40, SamplingParams(), [], [1], 8)
    cached = CachedRequestData(["chunk", "decode", "drafted"], [[], [], []], [100, 50, 60])
    output = SchedulerOutput(
        {"new": 30, "chunk": 20, "decode": 1, "drafted": 3}, [new], cached, draft_token_ids={"drafted": [1, 2]}
    )
    assert StepLoad.of(output) == StepLoad(50, 4, 50 + 3 * 60, 20 * 110 + 30 * 23)
