"""Admission: with a token set, a visitor sees and controls nothing before giving it."""

import hmac

import streamlit as st

from quire_dashboard.settings import Settings


def is_token(shown: str, token: str) -> bool:
    """Compares in constant time.

    The number of attempts is not limited: visitors cannot be told apart, so an attacker who used them up would lock out
    the operators. A token is too long to be guessed anyway.
    """
    return hmac.compare_digest(shown.encode(errors="replace"), token.encode())


def is_admitted() -> bool:
    """Whether this visitor may come in; asks for the token if not. `?token=…` in the address answers it."""
    token = Settings.from_environment().token
    if not token or st.session_state.get("admitted"):
        return True
    given = st.query_params.get("token", "")
    if given:
        # Removed from the address bar, where it would be seen, bookmarked and shared.
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
