"""A visitor of the dashboard without a browser: what a tab says to Streamlit and hears from it, and nothing drawn.

It opens a page over the websocket that a browser uses, takes in every message, and asks for the parts that refresh by
themselves as often as they say. So the dashboard does all that it does for a real tab, and the drawing, which happens
on the visitor's own machine, costs nothing here.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect

__all__ = ["Viewer"]

_MOST_BYTES = 64 * 2**20


@dataclass
class Viewer:
    """One tab on one page.

    Args:
        address: HOST:PORT of the dashboard.
        page: the page's path; empty: the first one.
    """

    address: str
    page: str = ""
    elements: Counter[str] = field(default_factory=Counter)
    """What was drawn so far, by kind; `exception` is an error box."""
    seconds: dict[str, float] = field(default_factory=dict)
    """After the page was opened: when the first element of each kind came, and `finished`, the end of the first run."""
    num_bytes: int = 0
    num_refreshes: int = 0
    """Parts that were drawn again by themselves, to the end."""
    interval_s: float = 0.0
    """Of the part that refreshes most often."""
    _opened: float = 0.0
    _timers: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)

    async def watch(self, until: float) -> None:
        """Look at the page until `time.monotonic()` is `until`.

        Raises:
            OSError: the dashboard is away.
        """
        address = f"ws://{self.address}/_stcore/stream"
        self._opened = time.monotonic()
        async with connect(address, subprotocols=["streamlit"], max_size=_MOST_BYTES) as connection:
            try:
                await self._ask(connection)
                while (left := until - time.monotonic()) > 0:
                    with suppress(asyncio.TimeoutError):
                        message = await asyncio.wait_for(connection.recv(), left)
                        self._take(connection, bytes(message))
            finally:
                self._stop_timers()

    async def _ask(self, connection: ClientConnection, fragment: str = "") -> None:
        message = BackMsg()
        message.rerun_script.page_name = self.page
        message.rerun_script.fragment_id = fragment
        message.rerun_script.is_auto_rerun = bool(fragment)
        await connection.send(message.SerializeToString())

    def _take(self, connection: ClientConnection, data: bytes) -> None:
        self.num_bytes += len(data)
        message = ForwardMsg()
        message.ParseFromString(data)
        kind = message.WhichOneof("type")
        if kind == "delta" and message.delta.WhichOneof("type") == "new_element":
            element = str(message.delta.new_element.WhichOneof("type"))
            self.elements[element] += 1
            self.seconds.setdefault(element, time.monotonic() - self._opened)
        elif kind == "new_session" and not message.metadata.run.fragment_ids:
            self._stop_timers()
        elif kind == "auto_rerun":
            again = message.auto_rerun
            self._start_timer(connection, again.fragment_id, again.interval)
        elif kind == "script_finished":
            self.seconds.setdefault("finished", time.monotonic() - self._opened)
            self.num_refreshes += message.script_finished == ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY

    def _start_timer(self, connection: ClientConnection, fragment: str, interval_s: float) -> None:
        """As a browser's `setInterval`."""
        self.interval_s = min(self.interval_s or interval_s, interval_s)
        if fragment in self._timers:
            self._timers.pop(fragment).cancel()

        async def run() -> None:
            start = time.monotonic()
            for turn in _count_from_one():
                await asyncio.sleep(max(0.0, start + turn * interval_s - time.monotonic()))
                await self._ask(connection, fragment)

        self._timers[fragment] = asyncio.create_task(run())

    def _stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


def _count_from_one() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number
