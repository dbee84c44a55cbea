"""The crash-loop breaker."""

from quire_engine.replicas.restart_policy import RestartPolicy
from quire_engine.system.crash_loop import MAX_DEATHS, MAX_DELAY_SECONDS, STABLE_SECONDS
from support.virtual_clock import Clock


def test_engines_without_progress_are_started_ever_later_and_for_ever() -> None:
    policy = RestartPolicy(Clock())
    delays, tripped = [], []
    for _ in range(2000):
        delays.append(policy.delay_after_death())
        tripped.append(policy.is_tripped)
        policy.engine_started()
    assert delays[:8] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_SECONDS, MAX_DELAY_SECONDS]
    assert set(delays[8:]) == {MAX_DELAY_SECONDS}
    assert tripped.index(True) == MAX_DEATHS - 1
    assert all(tripped[MAX_DEATHS - 1 :])


def test_an_engine_that_works_again_resets_the_breaker() -> None:
    policy = RestartPolicy(Clock())
    for _ in range(MAX_DEATHS):
        policy.delay_after_death()
        policy.engine_started()
    assert policy.is_tripped
    policy.note_progress()
    assert policy.delay_after_death() == 0.0
    assert not policy.is_tripped


def test_an_engine_that_made_progress_is_followed_at_once_however_often() -> None:
    policy = RestartPolicy(Clock())
    for _ in range(3 * MAX_DEATHS):
        policy.note_progress()
        assert policy.delay_after_death() == 0.0
        policy.engine_started()


def test_an_engine_that_was_up_for_a_while_counts_as_one_that_works() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    for _ in range(MAX_DEATHS - 1):
        policy.delay_after_death()
        policy.engine_started()
    policy.engine_is_ready()
    clock.now += STABLE_SECONDS + 1
    assert policy.delay_after_death() == 0.0
    policy.engine_started()
    assert policy.delay_after_death() == 0.0, "the count starts afresh"


def test_what_the_last_engine_did_says_nothing_about_the_next() -> None:
    policy = RestartPolicy(Clock())
    policy.note_progress()
    policy.delay_after_death()
    for _ in range(MAX_DEATHS):
        policy.engine_started()
        assert not policy.is_tripped
        policy.delay_after_death()
    assert policy.is_tripped


def test_a_model_that_takes_long_to_load_does_not_count_as_one_that_works() -> None:
    clock = Clock()
    policy = RestartPolicy(clock)
    for _ in range(MAX_DEATHS - 1):
        policy.delay_after_death()
        policy.engine_started()
        clock.now += 10 * STABLE_SECONDS
        policy.engine_is_ready()
        clock.now += 1.0  # and dies at its first step; or before it was ready:
    policy.engine_started()
    clock.now += 10 * STABLE_SECONDS
    policy.delay_after_death()
    assert policy.is_tripped
