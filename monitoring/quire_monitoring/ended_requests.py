"""EndedRequestLog: the last requests that have ended, for operators who ask why one was slow or failed.

A ring in the memory of the server's process, so that it outlives engines that die, and ends with the model::

    number   … 411   412   413   414   415         the next one is 416
                   └─ kept: the last `capacity` ─┘
    cursor       "9f2c61aa:414": of this ring, all before 414 has been seen

It holds no text of clients unless it is told to. Labels and the messages of errors are kept: an error may quote the
parameter that was wrong.

Under `quire serve` a `RequestFile` keeps the ring, and which requests are live. It survives the death of the server:
the next server's log goes on with the same ring, to which the requests that were lost have been added.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from quire_engine.errors import RequestError, quote
from quire_engine.pooling import PoolingParams
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.slo import SLOTargets
from quire_engine.snapshot import EndedRequest, EndedRequests
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

from quire_monitoring.request_file import (
    Begun,
    Died,
    Ended,
    Gone,
    Header,
    Line,
    RequestFile,
    left_by_the_dead,
    read_lines,
)

logger = logging.getLogger(__name__)

MAX_TEXT = 20_000
"""Characters of a prompt that are kept."""
_SAME_NAME = set(EndedRequest.__struct_fields__) & {*dir(FinishedRequestStats)} - {"prompt"}
"""Fields that an entry has as the statistics have them, where these are set."""
LOST = "lost"
"""`error_code` of a request whose server died."""


class EndedRequestLog:
    """A `StatLogger` that keeps ended requests. Thread-safe.

    Args:
        capacity: how many; 0 keeps none.
        slo_classes: the setting `slo`.
        keep_text: whether prompts are kept, too.
        folder: where the log survives this process, without prompts; None: nowhere.
        owner: names what the log belongs to: the next log of the same owner goes on with it.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        capacity: int,
        slo_classes: Mapping[str, SLOTargets],
        *,
        keep_text: bool = False,
        folder: Path | None = None,
        owner: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.Lock()
        self._ring: deque[EndedRequest] = deque(maxlen=capacity)
        self._capacity = capacity
        self._slo = {name: targets.seconds() for name, targets in slo_classes.items()}
        self._keep_text = keep_text
        self._clock = clock
        self._name = secrets.token_hex(4)
        """Of this ring: a cursor of another one is worth nothing."""
        self._since = clock()
        self._num_ended = 0
        self._live: dict[int, Begun] = {}
        self._file: RequestFile | None = None
        self.lost: Sequence[FinishedRequestStats] = ()
        """Requests whose server has died, since the last log of this owner: nothing has counted them yet."""
        if folder is not None and capacity:
            try:
                self._go_on(folder, list(owner))
            except OSError as error:
                logger.warning("the requests of this model will not survive the server's death: %s", error)

    def _go_on(self, folder: Path, owner: list[str]) -> None:
        paths = list(left_by_the_dead(folder))
        left = [(path, lines) for path in paths if (lines := read_lines(path)) and lines[0].owner == owner]
        if left:
            header, *lines = max(left, key=lambda one: one[0].stat().st_mtime_ns)[1]
            assert isinstance(header, Header)
            self._name, self._since = header.ring, header.since_unix
            self._ring.extend(line.request for line in lines if isinstance(line, Ended))
            self._num_ended = self._ring[-1].number + 1 if self._ring else 0
            self._bury(lines)
        file = RequestFile(folder, Header(owner=owner, ring=self._name, since_unix=self._since))
        self._rewrite(file)
        self._file = file
        for path, _ in left:
            path.unlink(missing_ok=True)

    def _bury(self, lines: Sequence[Line]) -> None:
        """Add what was live when the server died."""
        live: dict[int, Begun] = {}
        for line in lines:
            if isinstance(line, Begun):
                live[line.key] = line
            elif isinstance(line, Gone):
                live.pop(line.key, None)
        unknown = Died(why="the server's process ended", time_unix=self._clock())
        died = next((line for line in lines if isinstance(line, Died)), unknown)
        ended = {request.id for request in self._ring}
        self.lost = [
            FinishedRequestStats(
                "error", error=died.why, error_code=LOST, e2e_seconds=max(died.time_unix - one.time_unix, 0.0),
                request_id=one.id, options=one.options, num_prompt_tokens=one.num_prompt_tokens,
                slo_verdict="miss", slo_cause="error", missed_live=one.missed,
            )
            for one in live.values()
            if not one.id or one.id not in ended
        ]  # fmt: skip
        for request in self.lost:
            self._append(self._entry(request, died.time_unix))

    def begin(
        self, key: int, options: RequestOptions = NO_OPTIONS, *, request_id: str = "", num_prompt_tokens: int = 0
    ) -> None:
        """Note a request that is live from now on; again once more of it is known.

        Args:
            key: that it is ended by.
            options: what its caller says of it.
            request_id: the engine's name for it.
            num_prompt_tokens: once they are counted.
        """
        if self._file is None:
            return
        with self._lock:
            before = self._live.get(key)
            one = self._live[key] = Begun(
                key=key, time_unix=self._clock() if before is None else before.time_unix, id=request_id,
                options=options, num_prompt_tokens=num_prompt_tokens, missed=before is not None and before.missed,
            )  # fmt: skip
            self._write(one)

    def end(self, key: int) -> None:
        """The client has the last response of a request; no effect on one that was never begun."""
        if key in self._live:
            with self._lock:
                self._live.pop(key, None)
                self._write(Gone(key=key))

    def close(self) -> None:
        """Keep nothing for a next log. Idempotent."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.remove()

    def _write(self, line: Line) -> None:
        file = self._file
        if file is None:
            return
        try:
            file.append(line)
            if file.num_lines > 4 * self._capacity + 4 * len(self._live) + 100:
                self._rewrite(file)
        except OSError as error:  # such as a full disk: requests are served all the same
            logger.warning("requests no longer survive the server's death: %s", error)
            self._file = None
            file.remove()  # or else what it says would be told as the truth

    def _rewrite(self, file: RequestFile) -> None:
        file.rewrite([*map(self._without_text, self._ring), *self._live.values()])

    def _without_text(self, request: EndedRequest) -> Ended:
        """Text of clients is kept in memory alone."""
        if self._keep_text:
            numbers = {name: value for name, value in request.parameters.items() if _is_number(value)}
            request = msgspec.structs.replace(request, prompt=None, parameters=numbers)
        return Ended(request=request)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Keep the requests that ended with this step, and note the misses of live ones; returns at once."""
        for _, _, request_id in iteration_stats.misses:
            self._note_miss(request_id)
        for request in iteration_stats.finished_requests:
            self.add(request)

    def _note_miss(self, request_id: str) -> None:
        with self._lock:
            for key, one in self._live.items():
                if one.id == request_id and not one.missed:
                    one = self._live[key] = msgspec.structs.replace(one, missed=True)
                    self._write(one)

    def add(self, request: FinishedRequestStats) -> None:
        """Keep one; also one that was rejected before it reached the engine."""
        if not self._capacity:
            return
        with self._lock:
            entry = self._entry(request, self._clock())
            self._append(entry)
            self._write(self._without_text(entry))

    def _append(self, entry: EndedRequest) -> None:
        self._ring.append(entry)
        self._num_ended += 1

    def since(self, cursor: str = "") -> EndedRequests:
        """What is kept, or of that what has been added since an earlier answer.

        Args:
            cursor: of that answer. If it is of another ring, such as that of the model before it was loaded again,
                the answer is everything.

        Raises:
            RequestError: it is no cursor.
        """
        name, _, seen = cursor.partition(":")
        if cursor and not (name and seen.isascii() and seen.isdecimal() and len(seen) < 16):
            raise RequestError("cursor", f"cursor is {quote(cursor)}; it must be that of an earlier answer")
        with self._lock:
            first = self._num_ended - len(self._ring)
            skipped = max(int(seen) - first, 0) if name == self._name else 0
            return EndedRequests(
                cursor=f"{self._name}:{self._num_ended}",
                num_ended=self._num_ended,
                capacity=self._capacity,
                since_unix=self._since,
                slo=self._slo,
                requests=list(islice(self._ring, skipped, None)),
            )

    def _entry(self, request: FinishedRequestStats, time_unix: float) -> EndedRequest:
        phases: dict[str, Any] = {f"{phase}_seconds": seconds for phase, seconds in request.phase_seconds.items()}
        pooling = request.options.pooling_params
        params = request.params if pooling is None else pooling
        return EndedRequest(
            number=self._num_ended,
            time_unix=time_unix,
            id=request.request_id,
            label=request.options.label,
            slo_class=request.options.slo.slo_class,
            **{name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None},
            traceparent=request.options.traceparent or "",
            **phases,
            adapter="" if request.options.adapter is None else request.options.adapter.name,
            task="" if pooling is None else pooling.task or "pool",
            parameters={} if params is None else _parameters(params, self._keep_text),
            prompt=request.prompt[:MAX_TEXT] if self._keep_text and request.prompt is not None else None,
        )


def _parameters(params: SamplingParams | PoolingParams, keep_text: bool) -> dict[str, Any]:
    """Those that differ from their defaults. A `cache_salt` is a secret, and how output is delivered says nothing."""
    values: dict[str, Any] = msgspec.to_builtins(params)
    return {
        name: value
        for name, value in values.items()
        if name not in ("cache_salt", "output_kind", "task") and (keep_text or _is_number(value))
    }


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)
