"""Pages of the dashboard by Streamlit's own test harness: what they say, and their buttons."""

import re

from streamlit.testing.v1 import AppTest

__all__ = ["PAGE", "TIMEOUT_S", "open_page", "press", "text_of"]

TIMEOUT_S = 60
PAGE = """
import streamlit as st
from quire_dashboard.admission import is_admitted
from quire_dashboard.choice import pickers
from quire_dashboard.views import {page}

if is_admitted():
    pickers()
    {page}.show()
"""


def open_page(page: str, **address: str) -> AppTest:
    """A visitor comes to a page; `address` are the parameters in it."""
    app = AppTest.from_string(PAGE.format(page=page), default_timeout=TIMEOUT_S)
    for name, value in address.items():
        app.query_params[name] = value
    return app.run()


def text_of(app: AppTest) -> str:
    """Everything that the page says, in order of the kinds of elements, without the escapes of Markdown."""
    assert not app.exception, app.exception
    kinds = ("title", "subheader", "markdown", "caption", "text", "success", "info", "warning", "error")
    parts = [element.value for kind in kinds for element in app.get(kind)]
    text = "\n".join([*parts, *(f"{metric.label}={metric.value}" for metric in app.metric)])
    return re.sub(r"\\(?=[^a-zA-Z0-9\s])", "", text)


def press(app: AppTest, label: str) -> None:
    """Press a button; it takes effect with the next run."""
    next(button for button in app.button if button.label == label).click()
