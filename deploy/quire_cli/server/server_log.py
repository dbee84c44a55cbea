"""ServerLog: filters tritonserver's log to warnings, errors and Quire's lines, and finds out why a start failed.

An entry starts with a line such as `I1120 20:56:05.518395 6259 http_server.cc:4713] "…"`. Lines that start otherwise
belong to the entry before (tables), or are what a process printed: the entries of the engine itself, which start with
`quire engine[11172] INFO`, tracebacks, anything.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import IO, Literal

from quire_cli.console import Console

_ENTRY = re.compile(r"(?P<level>[EWIVF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (?P<source>[^:\]]+):\d+\] ")
_ENGINE = re.compile(r"quire (?P<process>\w+\[[^\]]*\]) (INFO|WARNING)\b")
_LOADING = re.compile(r"loading weights: (?P<percent>\d+)% of ")
_TABLE = re.compile(r"[+|]|\s*$")
_USAGE = "Usage: tritonserver"
# Logged on every machine without a GPU, where nothing can be done about it; at each stop; and as an error of 2.51 once
# for each request that fails with a gRPC status (triton_grpc_error, as those of the OpenAI gateway do).
_NOISE = (
    "CudaDriverHelper has not been initialized",
    "Signal (",
    "HandleCancellation called even when the context was not cancelled",
)
_KEPT_LINES = 2000
# A server that fails to start exits within seconds of its first error.
_HOLD_S = 10.0
_CAUSES = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<cause>.*)"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<cause>.*)"),
    re.compile(r"(?P<cause>failed to start \w+ service: .*)"),
    re.compile(r"(?P<cause>unrecognized option '[^']*')"),
    re.compile(r"^error: (?P<cause>.*)"),
)
_PREFIXES = re.compile(r"^(?:(?:Internal|Invalid argument|Unavailable|Not found|Unsupported|Unknown)(?::| -) |"
                       r"(?:c_python_backend_utils\.)?TritonModelException: )+")  # fmt: skip


class ServerLog:
    """Reads the server's output in a thread of its own.

    Until `release`, errors are held back for some seconds: if the start fails, one line says why, which they would
    bury. If the start goes on, they are passed on.
    """

    def __init__(self, stream: IO[bytes], console: Console, *, everything: bool) -> None:
        self._stream = stream
        self._console = console
        self._everything = everything
        self._lock = threading.Lock()
        self._held: list[tuple[float, str]] | None = [] if not everything else None
        self._last_line_at = time.monotonic()
        self.last_words = ""
        """The last line that a process other than the server itself printed, such as the reason why a stub died."""
        self._loading: dict[str, int] = {}
        """Percent of the weights that are loaded, by process."""
        self._recent: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """The server is ready: pass on what was held back, and from now on every line at once."""
        with self._lock:
            held, self._held = self._held or [], None
            for _, line in held:
                self._console.line(line)

    def release_old(self) -> None:
        """Pass on what was held back for some seconds; call it often while the server starts."""
        with self._lock:
            while self._held and time.monotonic() - self._held[0][0] > _HOLD_S:
                self._console.line(self._held.pop(0)[1])

    def silent_s(self) -> float:
        """Seconds since the last line."""
        return time.monotonic() - self._last_line_at

    def loading_percent(self) -> int | None:
        """Share of the weights loaded, of the model that is furthest behind; None if none has reported it."""
        with self._lock:
            return min(self._loading.values(), default=None)

    def finish(self) -> None:
        """Wait for the last lines of a server that has exited, but not for ever: a lost child may hold its log open."""
        self._thread.join(timeout=1.0)

    def cause(self) -> str | None:
        """Why the server failed, in one line, if its log says so."""
        with self._lock:
            return failure_cause(self._recent)

    def _read(self) -> None:
        sorter = _Sorter()
        with self._stream:
            for raw in self._stream:
                line = raw.decode(errors="replace").rstrip("\n")
                with self._lock:
                    self._add(line, sorter.sort(line), is_printed=sorter.is_printed)

    def _add(self, line: str, kind: Literal["show", "hold", "drop"], *, is_printed: bool) -> None:
        self._recent.append(line)
        self._last_line_at = time.monotonic()
        if (source := _ENGINE.match(line)) and (share := _LOADING.search(line)):
            self._loading[source["process"]] = int(share["percent"])
            kind = "drop"  # the waiting line shows it
        if is_printed:
            self.last_words = line.strip()
        if self._everything or kind == "show" or (kind == "hold" and self._held is None):
            self._console.line(line)
        elif kind == "hold" and self._held is not None:
            self._held.append((time.monotonic(), line))


class _Sorter:
    """Decides for each line: `show` at once, `hold` until the server is ready, or `drop`."""

    def __init__(self) -> None:
        self._last: Literal["show", "hold", "drop"] = "drop"
        self._in_usage = False
        self.is_printed = False
        """Whether the previous line was neither an entry of a log nor part of one."""

    def sort(self, line: str) -> Literal["show", "hold", "drop"]:
        entry = _ENTRY.match(line)
        self.is_printed = False
        if entry:
            self._in_usage = False
            # Entries of our own code name a Python file.
            ours = entry["source"].endswith(".py")
            self._last = "hold" if entry["level"] in "EF" else "show" if ours or entry["level"] == "W" else "drop"
        elif _ENGINE.match(line):
            self._last = "show"
        elif _USAGE in line:
            self._in_usage = True
        elif not _TABLE.match(line):
            self._last = "hold"
            self.is_printed = True
        if self._in_usage or any(noise in line for noise in _NOISE):
            self.is_printed = False
            return "drop"
        return self._last


def failure_cause(lines: Iterable[str]) -> str | None:
    """Find in a log why the server did not start; one line."""
    lines = list(lines)
    for pattern in _CAUSES:
        matches = [match for line in lines if (match := pattern.search(line))]
        if not matches:
            continue
        cause = _first_line(matches[0]["cause"])
        model = matches[0].groupdict().get("model")
        return f"model {model!r} did not load: {cause}" if model else cause
    return None


def _first_line(text: str) -> str:
    """The first line of a message that the log quotes and escapes, without the layers' names before it."""
    text = text.split("\\n")[0].rstrip().removesuffix('"').rstrip()
    return _PREFIXES.sub("", text.replace('\\"', '"').replace("\\'", "'"))
