"""The door: where a token is set, a visitor sees nothing and moves nothing before it is known."""

import hmac
import threading
import time
from collections.abc import Callable

import streamlit as st

from quire_dashboard.settings import Settings

__all__ = ["Door", "is_admitted"]

MOST_WRONG = 10
"""Wrong tokens in one window, of all visitors together."""
WINDOW_S = 1.0


class Door:
    """Compares what is shown with the token, and makes guessing it slow.

    After too many wrong ones nobody's is looked at, for a moment: whoever has the token tries again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._window_end = 0.0
        self._num_wrong = 0

    def opens(self, shown: str, token: str) -> bool | None:
        """Whether it is the token; None: it was not looked at."""
        with self._lock:
            now = self._clock()
            if now >= self._window_end:
                self._window_end, self._num_wrong = now + WINDOW_S, 0
            if self._num_wrong >= MOST_WRONG:
                return None
            is_right = hmac.compare_digest(shown.encode(errors="replace"), token.encode())
            self._num_wrong += not is_right
            return is_right


_door = Door()


def is_admitted() -> bool:
    """Whether this visitor may come in; asks for the token if not. `?token=…` in the address answers it."""
    token = Settings.from_environment().token
    if not token or st.session_state.get("admitted"):
        return True
    given = st.query_params.get("token", "")
    if given:
        # Not to be left in the address bar, where it would be seen, bookmarked and sent on.
        del st.query_params["token"]
    if not given:
        st.title("Quire")
        given = st.text_input("Token", type="password", help="What the dashboard was started with.")
    if not given:
        return False
    opens = _door.opens(given, token)
    if opens:
        st.session_state["admitted"] = True
        st.rerun()
    st.error("This is not the token." if opens is False else "Too many wrong tokens just now; try again in a moment.")
    return False
