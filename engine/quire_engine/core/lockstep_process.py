"""The process of one engine core that shares the experts with others. The rest is as in `core/core_process.py`.

A turn of its loop::

    receive ─► has work, or in a wave, or called? ─► say so ─► all there? ─► compute, or end the wave
        ▲                                                        │ not yet
        └────────────────────────────────────────────────────────┘ wait for them, or for messages
"""

import os
import time

import msgspec
import zmq

from quire_engine.core.core_process import WAITING_TURN_MS, EngineCoreProcess, main
from quire_engine.ipc.lockstep import Lockstep
from quire_engine.ipc.semaphore import SPIN_SECONDS
from quire_engine.messages import ProcessArguments, TakeSnapshot

HAS_WORK, SLEEPS = 1, 2
"""What an engine says at a meeting, added up."""


class LockstepProcess(EngineCoreProcess):
    """The loop between the two sockets and the meetings."""

    def __init__(self, arguments: ProcessArguments) -> None:
        assert arguments.lockstep is not None
        self._group = Lockstep(arguments.lockstep.cores, arguments.config.parallel.data_parallel_rank)
        self._has_arrived = self._is_in_wave = False
        self._deferred: list[tuple[int, bytes]] = []
        """Calls that would change what was said; they are made after the meeting."""
        super().__init__(arguments)
        self._poller.register(self._group.bell, zmq.POLLIN)

    def _serve(self) -> None:
        while True:
            self._heartbeat.turn(self._core.oldest_request_time)
            self._group.hear()  # first: what comes later rings again
            if not self._has_arrived:
                self._make_deferred_calls()
            self._receive()
            self._report()
            if self._stopping:
                return
            if self._has_arrived:
                self._meet()
            elif self._core.has_requests() or self._is_in_wave or self._group.is_called:
                self._arrive()
            else:
                self._rest()

    def _arrive(self) -> None:
        """Arrive at the next meeting."""
        self._group.begin(self._group.present_generation)
        self._group.arrive(HAS_WORK * self._core.has_requests() + SLEEPS * (self._core.sleep_level > 0))
        self._has_arrived = True
        end = time.perf_counter() + SPIN_SECONDS
        while not self._group.has_met and time.perf_counter() < end:
            os.sched_yield()

    def _meet(self) -> None:
        """Do what the engines have agreed on, if all are there."""
        group = self._group
        has_met = group.has_met
        said = group.said() if has_met else []
        if group.present_generation != group.generation:
            self._has_arrived = False  # what was said does not hold, and there will be another meeting
            return
        if not has_met:
            self._poll(WAITING_TURN_MS)  # so that the heartbeat moves
            return
        self._has_arrived = False
        has_work = any(number & HAS_WORK for number in said)
        is_awake = not any(number & SLEEPS for number in said)
        self._is_in_wave = has_work and is_awake
        if self._is_in_wave:
            self._compute()
        elif has_work:  # until the others are woken up, too
            self._poll(WAITING_TURN_MS)
        else:
            self._send_stats()

    def _compute(self) -> None:
        had_requests = self._core.has_requests()
        self._heartbeat.step()
        outputs = self._core.step(self._group.generation)
        if had_requests or outputs.outputs:
            self._send_outputs(outputs)

    def _report(self) -> None:
        """Send at once what others wait for: the next step may take long, or wait for an engine that is started."""
        if self._freed or self._rejected or self._utility_outputs:
            self._send_stats()

    def _call_utility(self, call_id: int, payload: bytes) -> None:
        if self._has_arrived and (self._deferred or not self._changes_nothing(payload)):
            self._deferred.append((call_id, payload))
        else:
            super()._call_utility(call_id, payload)

    def _changes_nothing(self, payload: bytes) -> bool:
        try:
            return isinstance(self._utility_decoder.decode(payload), TakeSnapshot)
        except msgspec.MsgspecError:
            return True  # it is rejected

    def _make_deferred_calls(self) -> None:
        deferred, self._deferred = self._deferred, []
        for call_id, payload in deferred:
            super()._call_utility(call_id, payload)

    def _end_generation(self) -> None:
        self._group.end(self._group.generation)


if __name__ == "__main__":
    main(LockstepProcess)
