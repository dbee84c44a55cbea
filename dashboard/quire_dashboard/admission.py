"""The door: where a token is set, a visitor sees nothing and moves nothing before it is known."""

import hmac
import threading
import time

import streamlit as st

from quire_dashboard.settings import Settings

__all__ = ["is_admitted", "matches"]

_WRONG_TOKEN_S = 1.0
"""How long a wrong token takes, one at a time over all visitors: too slow to guess."""
_one_at_a_time = threading.Lock()


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
    if matches(given, token):
        st.session_state["admitted"] = True
        st.rerun()
    st.error("This is not the token.")
    return False


def matches(given: str, token: str) -> bool:
    """Compare in constant time; a wrong one takes a while."""
    if hmac.compare_digest(given.encode(), token.encode()):
        return True
    with _one_at_a_time:
        time.sleep(_WRONG_TOKEN_S)
    return False
