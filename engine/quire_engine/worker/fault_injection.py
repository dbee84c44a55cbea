"""FaultInjection: makes a worker fail on demand, for tests of the recovery.

It is part of the package because faults have to occur in processes that a test does not start itself: ranks under an
engine core, under tritonserver. It is not created unless the environment names a file, and does nothing unless that
file exists::

    QUIRE_FAULT_INJECTION=/path/of/fault.json

    {"action": "kill", "token_id": 17}                 whenever token 17 is sampled: a poison request
    {"action": "kill", "num_output_tokens": 5, "once": true}    when a request's fifth token is sampled, one time
    {"action": "slow", "rank": 1, "seconds": 0.02}     every step of this rank takes so much longer

A fault without a rank applies to every rank. Create the file atomically (write another one, and rename it).
The fault occurs after the step was computed and before its result is sent.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec

from quire_engine.messages import ModelRunnerOutput
from quire_engine.worker.batch.input_batch import InputBatch

FAULT_INJECTION_VARIABLE = "QUIRE_FAULT_INJECTION"


class _Fault(msgspec.Struct):
    action: Literal["kill", "stop", "raise", "hang", "slow"]
    token_id: int | None = None
    num_output_tokens: int | None = None
    once: bool = False
    rank: int | None = None
    seconds: float = 0.0

    def is_reached(self, num_output_tokens: int | None, num_new_tokens: int) -> bool:
        """Whether a request that has so many tokens now has got to the fault's number with the new ones."""
        if self.num_output_tokens is None or num_output_tokens is None:
            return False
        return num_output_tokens - num_new_tokens < self.num_output_tokens <= num_output_tokens


class FaultInjection:
    """Reads the file after each step, so that it can appear and change while the worker runs."""

    def __init__(self, file: Path, rank: int = 0) -> None:
        self._file = file
        self._rank = rank

    @classmethod
    def from_environment(cls, rank: int = 0) -> "FaultInjection | None":
        """None if the environment does not name a file."""
        file = os.environ.get(FAULT_INJECTION_VARIABLE)
        return cls(Path(file), rank) if file else None

    def strike(self, output: ModelRunnerOutput, batch: InputBatch) -> None:
        """Fail, if the fault is due after this step."""
        try:
            fault = msgspec.json.decode(self._file.read_bytes(), type=_Fault)
        except FileNotFoundError:
            return
        if fault.rank not in (None, self._rank):
            return
        if fault.action == "slow":
            time.sleep(fault.seconds)
            return
        if not any(
            fault.token_id in token_ids or fault.is_reached(batch.num_output_tokens(request_id), len(token_ids))
            for request_id, token_ids in output.sampled_token_ids.items()
        ):
            return
        if fault.once:
            self._file.unlink()
        if fault.action == "raise":
            raise RuntimeError("an injected fault")
        if fault.action == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
