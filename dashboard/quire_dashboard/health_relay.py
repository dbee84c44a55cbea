"""HealthRelay: `GET /health` on the dashboard's port, which relays that of `quire serve`.

The dashboard itself knows less than `quire serve`, so without one it answers 404.
"""

import asyncio
import http.client
import json
from collections.abc import Mapping

from quire_load.scrape import get
from starlette.requests import Request
from starlette.responses import JSONResponse

from quire_dashboard.settings import Settings

_ANSWER_S = 2.0


class HealthRelay:
    """Asks one health address. Requests that come while one is under way share its answer.

    Args:
        address: HOST:PORT of `quire serve`'s.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._asking: asyncio.Task[tuple[int, Mapping[str, object]]] | None = None

    async def answer(self) -> tuple[int, Mapping[str, object]]:
        """Status code and body."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> tuple[int, Mapping[str, object]]:
        try:
            response, body = await asyncio.wait_for(asyncio.to_thread(get, self._address, "/health"), _ANSWER_S)
            said = json.loads(body)
            if response.status not in (200, 503) or not isinstance(said, dict):
                raise ValueError(response.status)  # something else listens there
        except (OSError, ValueError, RecursionError, http.client.HTTPException, asyncio.TimeoutError):
            return 503, {"status": "unavailable", "problems": [f"quire serve does not answer at {self._address}"]}
        return response.status, said


_relays: dict[str, HealthRelay] = {}


async def health(request: Request) -> JSONResponse:
    """The endpoint. If the dashboard has a token, requests without it only get the status."""
    settings = Settings.from_environment()
    if not settings.health:
        error = "only a dashboard that quire serve has started knows how its server is"
        return JSONResponse({"error": error}, 404)
    code, body = await _relays.setdefault(settings.health, HealthRelay(settings.health)).answer()
    shown = {"status": body.get("status")} if settings.token else body
    return JSONResponse(shown, code, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
