"""StructuredOutputManager: provides the grammar of every structured request, and the bitmask of every step.

::

    engine core's thread                                  compiler's thread                 compiler's process
    init_grammar ── not cached ──► CompilerProcess.submit ── queue ────────────────────────► compile
    poll (eventfd) ◄─────────────────────────────────────── load ◄────────────────────────── CompiledGrammar
    take_finished: cache, attach to the requests
    grammar_bitmask: a row for each position that the step samples of a structured request
"""

import contextlib
import logging
import math
import os
import select
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.errors import EngineUnavailableError
from quire_engine.messages import GrammarBitmask
from quire_engine.scheduler.grammar import Grammar, GrammarError
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.structured_output.compiler_messages import CompilerArguments, CompileRequest
from quire_engine.structured_output.compiler_process import CompilerProcess

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_BYTES = 256 << 20
"""Bytes of compiled grammars that are kept for further requests with the same schema."""
MAX_PENDING_JOBS = 256
"""Grammars that are being compiled or wait for it. Some hundred usual ones take a second."""
VERDICT_SECONDS = 30.0
"""For how long a grammar that took too much time is not tried again."""
SLOW_FILL_SECONDS = 0.01
"""A row that takes more CPU time is slow; usual rows take well below a thousandth of a second."""
STEP_SECONDS = 0.1
"""Limit of all slow rows of one step. Further requests that were slow in the step before are rejected."""

_Key = tuple[str, str, bool]


class StructuredOutputManager:
    """All its methods belong to the engine core's thread. The compiler's process starts with the first structured
    request, or with `start`."""

    def __init__(self, arguments: CompilerArguments) -> None:
        self._num_words = -(-arguments.vocab_size // 32)
        self._compiler = CompilerProcess(arguments)
        self._cache: OrderedDict[_Key, Any] = OrderedDict()
        """Compiled grammars, and errors of those that do not compile, least recently used first."""
        self._cached_bytes = 0
        self._jobs: dict[int, tuple[_Key, list[Request]]] = {}
        self._job_of: dict[_Key, int] = {}
        self._num_jobs = 0
        self._rejected: list[tuple[Request, GrammarError | None]] = []
        """Requests whose grammar is known to fail."""
        self.shutdown = weakref.finalize(self, self._compiler.shutdown)
        """End the compiler's process. Idempotent."""

    def start(self) -> None:
        """Start the compiler's process before it is needed. Follow with `imports_are_done`."""
        self._compiler.start()

    def imports_are_done(self) -> None:
        """From now on the compiler's thread may import what it needs."""
        self._compiler.may_import.set()

    def fileno(self) -> int:
        """A descriptor that becomes readable when `take_finished` has something."""
        return self._compiler.event

    def drain(self) -> None:
        """Make the descriptor unreadable again. To be called before `take_finished`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._compiler.event)

    def has_finished(self) -> bool:
        """Whether `take_finished` has something."""
        return bool(self._rejected or self._compiler.finished)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Block until `take_finished` has something, for so long at most."""
        poller = select.poll()  # not select(), which takes no descriptor above 1,023
        poller.register(self._compiler.event, select.POLLIN)
        timeout_ms = None if timeout_seconds is None else math.ceil(timeout_seconds * 1000)
        while not self.has_finished():
            ready = poller.poll(timeout_ms)
            self.drain()
            if not ready:
                return

    def init_grammar(self, request: Request) -> None:
        """Attach a request's grammar if it is cached, or else have it compiled.

        Raises:
            EngineUnavailableError: too many others are being compiled.
        """
        params = request.sampling_params.structured_outputs
        assert params is not None
        key = params.kind, params.text, not params.disable_any_whitespace
        if self._is_cached(key):
            self._cache.move_to_end(key)
            error = _attach(self._cache[key], request)
            if error is not None:
                self._rejected.append((request, error))
        elif key in self._job_of:
            self._jobs[self._job_of[key]][1].append(request)
        else:
            if len(self._jobs) >= MAX_PENDING_JOBS:
                self.drop_abandoned()
            if len(self._jobs) >= MAX_PENDING_JOBS and not request.is_replay and not self._drop_slow():
                raise EngineUnavailableError(f"{len(self._jobs)} other grammars wait to be compiled; try again later")
            job_id = self._num_jobs + 1
            try:
                self._compiler.submit(CompileRequest(job_id, *key))
            except Exception:
                logger.exception("a grammar cannot be given to the compiler")
                error = GrammarError("the grammar cannot be compiled; the server's log says why", None)
                self._rejected.append((request, error))
                return
            self._num_jobs = job_id
            self._jobs[job_id] = key, [request]
            self._job_of[key] = job_id

    def drop_abandoned(self) -> None:
        """Cancel grammars for which only requests that have ended wait."""
        abandoned = [
            job_id
            for job_id, (_, requests) in self._jobs.items()
            if all(request.status is RequestStatus.FINISHED for request in requests)
        ]
        for job_id in abandoned:
            self._drop(job_id)

    def _drop_slow(self) -> bool:
        """Reject the requests that wait for the slowest grammar, in favour of a new one. False if none is slow."""
        for job_id in self._compiler.slow_jobs():
            if job_id in self._jobs and not any(request.is_replay for request in self._jobs[job_id][1]):
                message = f"the grammar is slow to compile, and {len(self._jobs)} others wait; try again later"
                error = GrammarError(message, None, is_unavailable=True)
                self._rejected += [(request, error) for request in self._drop(job_id)]
                return True
        return False

    def _drop(self, job_id: int) -> list[Request]:
        """Cancel a grammar. Returns the requests that waited for it."""
        key, requests = self._jobs.pop(job_id)
        del self._job_of[key]
        self._compiler.cancel(job_id)
        return requests

    def take_finished(self, on_begin: Callable[[int], None]) -> list[tuple[Request, GrammarError | None]]:
        """The requests whose grammar has been attached, or has failed, since the last call.

        Args:
            on_begin: called before a request's output so far is read, with the number of its message.
        """
        requests, self._rejected = self._rejected, []
        while self._compiler.finished:
            job_id, grammar = self._compiler.finished.popleft()
            if job_id not in self._jobs:
                continue  # dropped
            key, waiting = self._jobs.pop(job_id)
            del self._job_of[key]
            if isinstance(grammar, GrammarError) and not grammar.cacheable and grammar.parameter is not None:
                grammar.expires_at = time.monotonic() + VERDICT_SECONDS  # a timeout
            if not isinstance(grammar, GrammarError) or grammar.cacheable or grammar.expires_at is not None:
                self._remember(key, grammar)
            for request in waiting:
                on_begin(request.message_number)
                requests.append((request, _attach(grammar, request)))
        return requests

    def grammar_bitmask(
        self, requests: Sequence[Request], drafts: Mapping[str, Sequence[int]] = MappingProxyType({})
    ) -> tuple[GrammarBitmask | None, list[tuple[Request, int]], list[tuple[Request, GrammarError]]]:
        """The tokens that may come next for these requests, and behind each of their drafts.

        Args:
            requests: that are sampled in a step.
            drafts: by request.

        Returns:
            The rows; how many drafts are left of the requests whose grammar does not allow all of theirs; the requests
            that have failed, whose rows forbid nothing: they take part in the step like any other.
        """
        if not requests:
            return None, [], []
        num_rows = len(requests) + sum(len(drafts.get(request.request_id, ())) for request in requests)
        bitmask = np.empty((num_rows, self._num_words), dtype=np.int32)
        cut: list[tuple[Request, int]] = []
        failed: list[tuple[Request, GrammarError]] = []
        slow_seconds, row = 0.0, 0
        for request in requests:
            grammar, own = request.grammar, drafts.get(request.request_id, ())
            assert grammar is not None
            num_left = 0
            try:
                if slow_seconds > STEP_SECONDS and grammar.last_fill_seconds > SLOW_FILL_SECONDS:
                    raise GrammarError(
                        "the grammar is too ambiguous: finding out what may come next takes "
                        f"{grammar.last_fill_seconds * 1e3:.0f} ms, and other requests take as long at the same time"
                    )
                grammar.fill_bitmask(bitmask, row)
                if grammar.last_fill_seconds > SLOW_FILL_SECONDS:
                    slow_seconds += grammar.last_fill_seconds
                elif own:
                    num_left = grammar.fill_behind(own, bitmask, row + 1)
                num_early = request.sampling_params.min_tokens - request.num_output_tokens
                for early_row in bitmask[row : row + 1 + num_left][: max(num_early, 0)]:
                    _forbid_stop(early_row, request.eos_token_ids | request.stop_token_ids)
            except Exception as error:
                bitmask[row] = -1
                failed.append((request, error if isinstance(error, GrammarError) else _failure(request)))
            if num_left < len(own):
                cut.append((request, num_left))
            row += 1 + num_left
        return GrammarBitmask([request.request_id for request in requests], bitmask[:row].tobytes()), cut, failed

    def _is_cached(self, key: _Key) -> bool:
        """Whether there is a grammar or an error. One that has expired is removed."""
        expires_at = getattr(self._cache.get(key), "expires_at", None)
        if expires_at is not None and expires_at <= time.monotonic():
            self._cached_bytes -= _size(key, self._cache.pop(key))
        return key in self._cache

    def _remember(self, key: _Key, grammar: Any) -> None:
        self._cache[key] = grammar
        self._cached_bytes += _size(key, grammar)
        while len(self._cache) > MAX_CACHED_GRAMMARS or self._cached_bytes > MAX_CACHED_BYTES:
            oldest, forgotten = self._cache.popitem(last=False)
            self._cached_bytes -= _size(oldest, forgotten)


def _size(key: _Key, grammar: Any) -> int:
    return len(key[1]) + int(getattr(grammar, "memory_size_bytes", 0))


def _attach(compiled: Any, request: Request) -> GrammarError | None:
    """Give a request a matcher of its own, advanced by the request's output so far."""
    if isinstance(compiled, GrammarError):
        return compiled
    if compiled.too_slow is not None:
        return GrammarError(compiled.too_slow)
    try:
        from quire_engine.structured_output.xgrammar import XGrammar

        grammar: Grammar = XGrammar(compiled)
        if not grammar.accept_tokens(request.all_token_ids[request.num_prompt_tokens :]):
            return GrammarError("the output so far does not follow the grammar", None)
    except Exception:
        return _failure(request)
    request.grammar = grammar
    return None


def _failure(request: Request) -> GrammarError:
    logger.exception("the grammar of request %s failed", request.request_id)
    return GrammarError("the grammar failed; the server's log says why", None)


def _forbid_stop(row: npt.NDArray[np.int32], token_ids: Iterable[int]) -> None:
    """Apply `min_tokens`, unless the grammar allows nothing else than the end."""
    before = row.copy()
    for token_id in token_ids:
        row.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not row.any():
        row[:] = before
