"""Relay: a port that leads to another one, until it is closed."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from support.ports import free_port

__all__ = ["Relay"]

CHUNK_BYTES = 1 << 16


class Relay:
    """Leads connections on, such as a proxy in front of a server does.

    Args:
        loop: where it runs.
        port: that it listens on.
        target: HOST:PORT that it leads to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, target: str) -> None:
        self.address = f"127.0.0.1:{port}"
        self._loop, self._port, self._target = loop, port, target

    @classmethod
    @contextmanager
    def to(cls, loop: asyncio.AbstractEventLoop, target: str) -> "Iterator[Relay]":
        """One that is open, on a free port."""
        with free_port() as port:
            relay = cls(loop, port, target)
            relay._open()
            try:
                yield relay
            finally:
                relay._close()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Meanwhile nothing listens there."""
        self._close()
        try:
            yield
        finally:
            self._open()

    def _open(self) -> None:
        starting = asyncio.start_server(self._lead, "127.0.0.1", self._port)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)

    def _close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._server.wait_closed(), self._loop).result(10)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        with suppress(OSError), closing(writer):  # where there is nobody, there is nobody here
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with closing(far_writer):
                copies = [
                    asyncio.ensure_future(_copy(reader, far_writer)), asyncio.ensure_future(_copy(far_reader, writer))
                ]  # fmt: skip
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
