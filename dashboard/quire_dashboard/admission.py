"""The door: where a token is set, a visitor sees nothing and moves nothing before it is known."""

import hmac

import streamlit as st

from quire_dashboard.settings import Settings

__all__ = ["is_admitted", "is_token"]


def is_token(shown: str, token: str) -> bool:
    """Compares in a time that does not tell how much of it was right.

    There is no limit of attempts: of visitors nothing is known, so whoever used it up would lock out the operators. A
    token is too long to be guessed at any rate.
    """
    return hmac.compare_digest(shown.encode(errors="replace"), token.encode())


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
    if is_token(given, token):
        st.session_state["admitted"] = True
        st.rerun()
    st.error("This is not the token.")
    return False
