"""MultiProcExecutor: one process per rank on this machine, connected by queues in shared memory.

::

                         ┌─ calls: one queue, every rank reads all of it ──► rank 0, 1, …
    EngineCore ── executor
                         └─ responses: one queue per rank ◄───────────────── rank i

Only the output rank answers a step with its result; any rank may answer with an error. Every rank answers other calls.
While the executor waits for an answer, it watches the processes: one that ends or is stopped ends the wait.

An error of a rank only ends the step, and all ranks go on. Two kinds of errors end the engine: an error of a GPU, which
makes its process unusable, and any error of one of several ranks on GPUs, as the others wait for it on their GPU and
cannot be interrupted.
"""

import collections
import contextlib
from collections.abc import Callable

import msgspec

from quire_engine.config import EngineCoreConfig
from quire_engine.errors import AbortedError, CheckpointError, EngineDeadError, EngineError
from quire_engine.executor.base import Executor
from quire_engine.executor.worker_processes import WorkerProcesses
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.ipc.message_queue import MessageReader, MessageWriter
from quire_engine.ipc.semaphore import Waiter, Watch
from quire_engine.messages import (
    ExecuteModel,
    ForgetGroups,
    ModelRunnerOutput,
    SchedulerOutput,
    Shutdown,
    StepNanoseconds,
    UsesGpu,
    WorkerCall,
    WorkerProcessCall,
    WorkerRequest,
    WorkerResponse,
)
from quire_engine.worker.arguments import rank_state

READY = 0
"""Call id of the message by which a worker reports that it is ready."""
SHUTDOWN_SECONDS = 3.0
"""Timeout of workers that end by themselves, before they are killed."""
ERRORS: dict[str, type[Exception]] = {
    "CheckpointError": CheckpointError,
    "EngineDeadError": EngineDeadError,
    "ValueError": ValueError,
    "OSError": OSError,
}
"""Errors of a rank that keep their class; all others become an EngineError."""


class MultiProcExecutor(Executor):
    """Starts the workers, calls them, and collects their answers."""

    def __init__(
        self,
        config: EngineCoreConfig,
        max_model_len: int,
        expert_shape: tuple[int, int] | None = None,
        expert_group: LockstepHandle | None = None,
    ) -> None:
        self.num_stages = config.parallel.pipeline_parallel_size
        self._output_rank = rank_state(config.parallel).output_rank
        self._next_call_id = READY + 1
        self._submitted: collections.deque[int] = collections.deque()
        self._answers: dict[int, dict[int, WorkerResponse]] = {}
        self._recovered_at = READY
        self._dead: EngineDeadError | None = None
        self._is_shut_down = False
        self._is_taking = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerResponse)
        self._workers = WorkerProcesses(config, max_model_len, expert_shape, expert_group)
        self.board = self._workers.board
        watch = Watch(self._workers.pidfds, self._check_workers)
        self._calls = MessageWriter(self._workers.calls, watch)
        self._responses = [MessageReader(handle, 0, watch) for handle in self._workers.responses]
        self._waiter = Waiter([reader.filled for reader in self._responses], watch)
        try:
            self._wait_for_all(READY)
            error = self._first_error(READY)
            if error is not None:
                raise error
            self.async_scheduling = config.async_scheduling(uses_gpu=all(self.collective_rpc(UsesGpu())))
        except BaseException:
            self._end()
            raise

    @property
    def worker_pids(self) -> list[int]:
        return self._workers.pids

    @property
    def death_descriptors(self) -> list[int]:
        return self._workers.pidfds

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead
        self._check_workers()

    def rank_step_seconds(self) -> list[float | None]:
        """A call to every rank, so it waits for the steps in flight."""
        return [nanoseconds / 1e9 or None for nanoseconds in self.collective_rpc(StepNanoseconds())]

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        self._submitted.append(self._call(ExecuteModel(scheduler_output)))

    def collect(self) -> ModelRunnerOutput:
        call_id = self._submitted.popleft()
        self._wait_until(lambda: self._output_rank in self._answers.get(call_id, ()) or self._has_error(call_id))
        for earlier in [earlier for earlier in self._answers if earlier < call_id]:
            del self._answers[earlier]  # of a rank that failed after it had done its part
        answers = self._settle(call_id, is_step=True)
        output = answers[self._output_rank].output
        assert output is not None
        return output

    def collective_rpc(self, call: WorkerCall | StepNanoseconds) -> list[int]:
        """A ValueError, CheckpointError or OSError of a rank keeps its class."""
        call_id = self._call(call)
        self._wait_for_all(call_id)
        answers = self._settle(call_id)
        return [answers[rank].result for rank in range(len(self._responses))]

    def shutdown(self) -> None:
        """Workers that do not end by themselves are killed."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._dead is None:
            with contextlib.suppress(EngineDeadError, TimeoutError, RuntimeError):
                self._calls.write(self._encoder.encode(WorkerRequest(READY, Shutdown())), timeout=0.1)
                self._workers.wait(SHUTDOWN_SECONDS)
            self._dead = EngineDeadError("the executor was shut down")
        self._end()

    def _end(self) -> None:
        self.board = None
        self._workers.end()
        self._calls.close()
        for reader in self._responses:
            reader.close()

    # -- calls and answers ---------------------------------------------------------------------------------------------

    def _call(self, call: WorkerProcessCall) -> int:
        if self._dead is not None:
            raise self._dead
        call_id = self._next_call_id
        self._next_call_id += 1
        self._calls.write(self._encoder.encode(WorkerRequest(call_id, call)))
        return call_id

    def _wait_for_all(self, call_id: int) -> None:
        """Wait until all ranks have answered; or until one has failed, if those that wait for it cannot be freed.
        Raises EngineDeadError if a rank has failed in a step that was submitted before."""

        def ready() -> bool:
            if len(self._answers.get(call_id, ())) == len(self._responses):
                return True
            if call_id != READY and self._workers.can_reset_groups:
                return False
            for failed in filter(self._has_error, sorted(self._answers)):
                if failed < call_id:
                    self._dead = EngineDeadError(str(self._first_error(failed)))
                    raise self._dead
            return self._has_error(call_id)

        self._wait_until(ready)

    def _has_error(self, call_id: int) -> bool:
        return any(answer.error is not None for answer in self._answers.get(call_id, {}).values())

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        def look() -> bool:
            self._take_answers()
            return ready()

        if self._dead is not None:
            raise self._dead
        self._waiter.wait_until(look)

    def _take_answers(self) -> bool:
        """Read the answers that have arrived; waits only for the rest of a message. Returns whether there were any."""
        if self._is_taking:  # called by the watch, while waiting for the rest of a message
            return False
        self._is_taking = True
        any_came = False
        try:
            for rank, reader in enumerate(self._responses):
                while reader.filled.can_acquire():
                    response = reader.read_with(self._decoder.decode)
                    self._answers.setdefault(response.call_id, {})[rank] = response
                    any_came = True
        finally:
            self._is_taking = False
        return any_came

    def _settle(self, call_id: int, is_step: bool = False) -> dict[int, WorkerResponse]:
        """The answers to a call. If a rank has failed, the ranks are made usable again before the error is raised.

        Raises:
            EngineDeadError: they cannot be made usable. A call between steps raises its own error all the same, and the
                next call raises this.
            Exception: the first cause among the errors.
        """
        error, has_others = self._first_error(call_id), len(self._responses) > 1
        if error is None:
            return self._answers.pop(call_id)
        if isinstance(error, EngineDeadError) or (has_others and not self._workers.can_reset_groups):
            self._dead = EngineDeadError(str(error))
            raise self._dead if is_step else error
        if has_others and call_id > self._recovered_at:
            self._recover()
        error = self._first_error(call_id)  # by now all ranks have answered
        del self._answers[call_id]
        assert error is not None
        raise error

    def _first_error(self, call_id: int) -> Exception | None:
        """The first cause among the errors of a call, if there are any."""
        answers = self._answers.get(call_id, {})
        failed = [(rank, answer) for rank, answer in sorted(answers.items()) if answer.error is not None]
        if not failed:
            return None
        rank, answer = next((item for item in failed if not item[1].is_aborted), failed[0])
        kind = AbortedError if answer.is_aborted else ERRORS.get(answer.error_type, EngineError)
        is_one_of_several = issubclass(kind, EngineError) and kind is not CheckpointError and len(self._responses) > 1
        return kind(f"rank {rank}: {answer.error}" if is_one_of_several else answer.error)

    def _recover(self) -> None:
        """After an error with several ranks: free the ranks that wait for the failed one.

        1. The failed rank has raised the abort flag, so all others fail as well, wherever they wait, and so do all
           ranks in the steps that were submitted after this one.
        2. Every rank answers `ForgetGroups` when it has finished those steps and no longer uses its groups.
        3. The groups and the flag are reset.
        """
        call_id = self._call(ForgetGroups())
        self._wait_for_all(call_id)
        self._workers.reset_groups()
        self._answers.pop(call_id)
        self._recovered_at = call_id

    def _check_workers(self) -> None:
        """Raises EngineDeadError when a worker has ended or hangs, after reading its last answers.

        Answers are read in any case: a worker without room for its answer reads no calls, and a call may be waiting.
        """
        dead = self._workers.find_dead()
        if not self._take_answers() and dead is not None:
            self._dead = EngineDeadError(dead)
            raise self._dead
