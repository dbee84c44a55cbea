"""What `streamlit run` serves: the program of `app`, only for pages of its own origin.

Streamlit accepts a websocket from any page of `localhost`, on every port, so that another user of the machine, or any
program that serves a page there, could control the dashboard of its visitors; and for a page of an unknown host it
asks the Internet for its own address. The watchers start with the process, so that the first visitor finds a history.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import streamlit as st
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit import config

from quire_dashboard.watchers import close_monitors, monitors


class OwnPagesOnly:
    """Rejects websockets from pages of another origin. Clients other than browsers send no origin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not _is_own(Headers(scope=scope)):
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: the answer is 403
            return
        await self._app(scope, receive, send)


def _is_own(headers: Headers) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return True
    # Behind a proxy that changes the host, the origin is one that Streamlit was configured with.
    allowed: list[Any] = config.get_option("server.corsAllowedOrigins")
    return urlsplit(origin).netloc == headers.get("host") or origin in allowed


def to_the_overview(request: Request) -> RedirectResponse:
    """The page that comes first has no path of its own in Streamlit, and is looked for under its name all the same."""
    return RedirectResponse(f"./?{request.url.query}" if request.url.query else "./")


def _import_pages() -> None:
    """Import what the pages need, and what Streamlit imports for them when they are drawn: on a saturated machine, the
    first visitor would wait for that for tens of seconds."""
    for name in ("quire_dashboard.app", "pandas"):
        importlib.import_module(name)


@asynccontextmanager
async def watching(_: st.App) -> AsyncIterator[None]:
    """Watch the servers as long as the dashboard runs, with or without visitors."""
    await asyncio.to_thread(_import_pages)
    await asyncio.to_thread(monitors)
    try:
        yield
    finally:
        await asyncio.to_thread(close_monitors)


app = st.App(
    Path(__file__).with_name("app.py"),
    middleware=[Middleware(OwnPagesOnly)],
    routes=[Route("/overview", to_the_overview)],
    lifespan=watching,
)
