"""The door of the dashboard: who has the token comes in, and nobody else."""

import pytest
from quire_dashboard.admission import is_token
from quire_dashboard.settings import Settings

TOKEN = "öpen sesame, please"


def test_only_the_token_opens_and_guesses_of_others_do_not_matter() -> None:
    for shown in ("guess", "\ud800 guess", TOKEN[:-1], TOKEN + ".") * 100:
        assert not is_token(shown, TOKEN)
    assert is_token(TOKEN, TOKEN)


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="has 15 characters; it must have at least 16"):
        Settings(token="fifteen letters")
