"""Other hosts for tests: network namespaces, each joined to this one by a pair of virtual devices."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

__all__ = ["Namespace", "namespaces"]

NETWORK = "198.51.100"
"""A documentation range (RFC 5737); machines that run tests have been seen in the first of these ranges, 192.0.2."""


@dataclass(frozen=True)
class Namespace:
    """One of them."""

    name: str
    device: str
    """On this side."""
    gateway: str
    """This host's address, as seen from there."""

    def command(self, *arguments: str) -> list[str]:
        """What runs a program in it."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def cut(self) -> None:
        """Nothing passes any more, and neither side is told."""
        _ip("link", "set", self.device, "down")

    def mend(self) -> None:
        """It passes again."""
        _ip("link", "set", self.device, "up")


@contextlib.contextmanager
def namespaces(number: int) -> Iterator[list[Namespace]]:
    """So many, gone afterwards; skips the test where the kernel does not let us have them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    made: list[Namespace] = []
    with contextlib.ExitStack() as stack:
        for index in range(number):
            # Four addresses for each.
            name, start = f"quire-{os.getpid()}-{index}", 4 * ((os.getpid() * number + index) % 64)
            device, gateway, own = f"q{os.getpid()}-{index}", f"{NETWORK}.{start + 1}", f"{NETWORK}.{start + 2}"
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            stack.callback(_ip, "netns", "delete", name)  # and the devices with it
            try:
                _ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no virtual devices here: {error.stderr.decode().strip()}")
            _ip("address", "add", f"{gateway}/30", "dev", device)
            _ip("link", "set", device, "up")
            for arguments in (["address", "add", f"{own}/30", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                _ip("-n", name, *arguments)
            made.append(Namespace(name, device, gateway))
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
