"""The door of the dashboard: who has the token comes in, and guessing it takes for ever."""

import pytest
from quire_dashboard.admission import MOST_WRONG, WINDOW_S, Door
from quire_dashboard.settings import Settings

TOKEN = "open sesame, please"


def test_guesses_are_limited_and_lock_nobody_out_for_long() -> None:
    now = 100.0
    door = Door(clock=lambda: now)
    for _ in range(3):
        assert door.opens(TOKEN, TOKEN)
        assert [door.opens("\ud800 guess", TOKEN) for _ in range(MOST_WRONG)] == [False] * MOST_WRONG
        assert door.opens("guess", TOKEN) is None
        assert door.opens(TOKEN, TOKEN) is None
        now += WINDOW_S
    assert door.opens(TOKEN, TOKEN)


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="QUIRE_DASHBOARD_TOKEN has 15 characters; it must have at least 16"):
        Settings(token="fifteen letters")
