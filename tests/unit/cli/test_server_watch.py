"""When a silence is a hang, and when this process was only late itself."""

from quire_cli.server_watch import LOOK_S, Patience


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def test_each_has_a_silence_of_its_own() -> None:
    clock = Clock()
    patience = Patience(clock)
    for number in range(5):
        patience.silence_s("a", 1)
        patience.silence_s("b", number)
        clock.now += LOOK_S
    assert patience.silence_s("a", 1) > 0
    assert patience.silence_s("b", 5) == 0
