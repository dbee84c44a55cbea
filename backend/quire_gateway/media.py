"""Images that messages name by URL: fetched here, from the domains that the operator allows.

A URL comes from a client, so that it could point at what only this machine reaches. The name is resolved once, all of
its addresses must be public, and the connection goes to one of these; redirects are not followed.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Collection, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import h11

from quire_gateway.errors import InvalidRequestError

FETCH_SECONDS = 10.0
"""For all images of a request."""
_URL = re.compile(r"[!-\[\]-~]+")
"""Without spaces, and the backslash, which parsers of URLs read differently."""
_READ_BYTES = 64 << 10


class _FetchError(Exception):
    """An image cannot be fetched; the message says why."""


class Media:
    """Fetches the images of conversations.

    Args:
        allowed_domains: hosts of URLs, in lower case; images of other hosts are rejected.
        max_bytes: of all that are fetched for one request.
    """

    def __init__(self, allowed_domains: Collection[str], max_bytes: int) -> None:
        self._allowed_domains, self._max_bytes = allowed_domains, max_bytes
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, conversation: Mapping[str, Any], param: str) -> Mapping[str, Any]:
        """The same conversation, with the files of images that it has the URLs of.

        Args:
            conversation: with `images`, if it has any: files, or URLs.
            param: the field of the body that it comes from.

        Raises:
            InvalidRequestError: an image cannot be fetched.
        """
        images = list(conversation.get("images", ()))
        if not any(isinstance(image, str) for image in images):
            return conversation
        num_bytes, url = 0, ""

        async def fetch_all() -> None:
            nonlocal num_bytes, url
            for i, image in enumerate(images):
                if isinstance(image, str):
                    url = image
                    images[i] = await self._fetch(url, self._max_bytes - num_bytes)
                    num_bytes += len(images[i])

        try:
            await asyncio.wait_for(fetch_all(), FETCH_SECONDS)
        except (_FetchError, OSError, asyncio.TimeoutError, h11.ProtocolError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, asyncio.TimeoutError):
                reason = f"it takes more than {FETCH_SECONDS:.0f} s"
            raise InvalidRequestError(param, f"{param}: the image {url[:200]} cannot be fetched: {reason}") from None
        return {**conversation, "images": images}

    async def _fetch(self, url: str, max_bytes: int) -> bytes:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise _FetchError(str(error)) from None
        if not _URL.fullmatch(url) or "@" in parts.netloc or not host:
            raise _FetchError("the URL must be http(s)://HOST[:PORT]/PATH, in ASCII")
        if host not in self._allowed_domains:
            names = ", ".join(sorted(self._allowed_domains)) or "none"
            raise _FetchError(
                f"its host is not one of allowed_media_domains ({names}), which quire openai --allowed-media-domain "
                "sets; or send a data: URL"
            )
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(one[4][0]) for one in found]
        if not addresses or not all(map(is_public, addresses)):
            raise _FetchError("its address is not a public one")
        if parts.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        is_tls = parts.scheme == "https"
        reader, writer = await asyncio.open_connection(
            addresses[0], port, ssl=self._tls if is_tls else None, server_hostname=host if is_tls else None
        )
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            return await _get(reader, writer, parts.netloc, target, max_bytes)
        finally:
            writer.transport.abort()


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, and contains none of IPv4 that is not.

    Args:
        address: of IPv4 or IPv6, as the resolver writes it.
    """
    ip = ip_address(address.partition("%")[0])
    is_tunnel = isinstance(ip, IPv6Address) and (ip.sixtofour or ip.teredo) is not None
    # Reserved ones include IPv4 in IPv6 (mapped, compatible, NAT64).
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not is_tunnel


async def _get(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str, max_bytes: int
) -> bytes:
    connection = h11.Connection(h11.CLIENT)
    headers = [("host", host), ("accept", "*/*"), ("accept-encoding", "identity"), ("connection", "close"),
               ("user-agent", "quire")]  # fmt: skip
    writer.write(connection.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
    writer.write(connection.send(h11.EndOfMessage()) or b"")
    content = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response) and event.status_code != 200:
            what = "redirects are not followed" if 300 <= event.status_code < 400 else "it must be 200"
            raise _FetchError(f"the answer's status is {event.status_code}; {what}")
        elif isinstance(event, h11.Data):
            content += event.data
            if len(content) > max_bytes:
                raise _FetchError(f"images of a request may have {max_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(content)
        elif isinstance(event, h11.ConnectionClosed):
            raise _FetchError("the connection was closed")
