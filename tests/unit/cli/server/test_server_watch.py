"""When a silence is a hang, and when this process was only late itself."""

import os

import pytest
from quire_backend.status_page import StubState, StubStatus
from quire_cli.server.loaded_models import IndexedModel
from quire_cli.server.server_watch import LOOK_S, Patience, without_past_unloads
from support.virtual_clock import Clock


def test_a_silence_lasts_from_the_last_move_on() -> None:
    clock = Clock()
    patience = Patience(clock)
    silences = []
    for sign in (1, 1, 1, 2, 2, None, None, 3):
        silences.append(round(patience.silence_s("a", sign) / LOOK_S))
        clock.now += LOOK_S
    assert silences == [0, 1, 2, 0, 1, 2, 3, 0]


def test_time_in_which_nobody_looked_counts_little() -> None:
    clock = Clock()
    patience = Patience(clock)
    patience.silence_s("a", 1)
    clock.now += 60.0  # as when the machine is so busy that this process does not get to run either, or was asleep
    assert patience.silence_s("a", 1) <= 2 * LOOK_S


def test_what_has_nothing_to_send_is_not_silent() -> None:
    """As `ServerWatch` looks at `sending`: another sign each time while there is nothing."""
    clock = Clock()
    patience = Patience(clock)
    for _ in range(1000):
        assert patience.silence_s("sending", object()) == 0
        clock.now += LOOK_S
    assert patience.silence_s("sending", 7) == 0
    clock.now += LOOK_S
    assert patience.silence_s("sending", 7) == pytest.approx(LOOK_S)


def test_each_has_a_silence_of_its_own() -> None:
    clock = Clock()
    patience = Patience(clock)
    for number in range(5):
        patience.silence_s("a", 1)
        patience.silence_s("b", number)
        clock.now += LOOK_S
    assert patience.silence_s("a", 1) > 0
    assert patience.silence_s("b", 5) == 0


@pytest.mark.parametrize(("started_s", "is_over"), [(99.0, False), (101.0, True)])
def test_an_unload_is_over_when_a_stub_was_started_since(started_s: float, is_over: bool) -> None:
    """A load over HTTP holds up the connection that asks: what was said last may be older than the load."""
    page = StubStatus(
        pid=1, start_time=int(started_s * os.sysconf("SC_CLK_TCK")), model="m", version="1", instance="m_0_0", beats=1,
        state=StubState.UP, reason="", num_in_flight=0, sending=0, num_instances=1,
    )  # fmt: skip
    index = [IndexedModel("m", "1", "UNLOADING"), IndexedModel("other", "1", "UNLOADING")]
    assert without_past_unloads(index, [page], 100.0) == index[is_over:]
