"""The crash-loop breaker."""

from quire_engine.core.supervisor import FRUITFUL_SECONDS, MAX_FRUITLESS_DEATHS, RestartPolicy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_fruitless_engines_are_started_ever_later_and_then_no_more() -> None:
    policy = RestartPolicy(Clock())
    delays = []
    while (delay := policy.delay_after_death()) is not None:
        delays.append(delay)
        policy.engine_started()
    assert delays == [0.0, 1.0, 2.0, 4.0]
    assert policy.num_fruitless_deaths == MAX_FRUITLESS_DEATHS


def test_a_fruitful_engine_is_followed_at_once_however_often() -> None:
    policy = RestartPolicy(Clock())
    for _ in range(3 * MAX_FRUITLESS_DEATHS):
        policy.engine_was_fruitful()
        assert policy.delay_after_death() == 0.0
        policy.engine_started()


def test_an_engine_that_was_up_for_a_while_counts_as_one_that_works() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    for _ in range(MAX_FRUITLESS_DEATHS - 1):
        assert policy.delay_after_death() is not None
        policy.engine_started()
    policy.engine_is_ready()
    clock.now += FRUITFUL_SECONDS + 1
    assert policy.delay_after_death() == 0.0
    policy.engine_started()
    assert policy.delay_after_death() == 0.0, "the count starts afresh"


def test_what_the_last_engine_did_says_nothing_about_the_next() -> None:
    policy = RestartPolicy(Clock())
    policy.engine_was_fruitful()
    for _ in range(MAX_FRUITLESS_DEATHS):
        assert policy.delay_after_death() is not None
        policy.engine_started()
    assert policy.delay_after_death() is None


def test_a_model_that_takes_long_to_load_does_not_count_as_one_that_works() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    for _ in range(MAX_FRUITLESS_DEATHS - 1):
        assert policy.delay_after_death() is not None
        policy.engine_started()
        clock.now += 10 * FRUITFUL_SECONDS
        policy.engine_is_ready()
        clock.now += 1.0  # and dies at its first step; or before it was ready:
    policy.engine_started()
    clock.now += 10 * FRUITFUL_SECONDS
    assert policy.delay_after_death() is None
