"""WorkerProcesses: starts one process per rank, detects that one has ended or was stopped, and ends them. It knows no
calls.

Each process inherits the descriptors of its own queues and groups only, so that no sibling holds an end of a pipe open,
and all die with this process, however it dies.
"""

import contextlib
import os
import subprocess
import threading
import weakref

from quire_engine.config import EngineCoreConfig
from quire_engine.device.placement import rank_device
from quire_engine.distributed import ParallelState
from quire_engine.distributed.shared_memory import AbortFlag, AbortFlagHandle, MeetingPlace, SharedMemoryGroup
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.ipc.message_queue import MessageQueueHandle
from quire_engine.system.child_process import start_module
from quire_engine.system.process_state import how_it_ended, is_stopped
from quire_engine.worker.arguments import WorkerArguments
from quire_engine.worker.rank_board import RankBoard

_Handle = MessageQueueHandle | AbortFlagHandle | SharedMemoryGroup | MeetingPlace | RankBoard


def uses_shared_memory(config: EngineCoreConfig) -> bool:
    """Whether the ranks communicate by shared memory; on GPUs NCCL is faster."""
    return rank_device(config, 0).type == "cpu"


class WorkerProcesses:
    """All ranks of one engine. When this object is dropped, they are killed and the descriptors closed.

    Args:
        config: the engine core's.
        max_model_len: the longest sequence.
        expert_shape: layers and experts; None without experts.
        expert_group: where the ranks meet those of other engines; it outlives this object.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        max_model_len: int,
        expert_shape: tuple[int, int] | None = None,
        expert_group: LockstepHandle | None = None,
    ) -> None:
        self._expert_group = expert_group
        parallel = config.parallel
        tensor_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        shares_memory = parallel.world_size == 1 or uses_shared_memory(config)  # before anything is open: it may raise
        self.calls = MessageQueueHandle.create(parallel.world_size)
        self.responses = [MessageQueueHandle.create(1) for _ in range(parallel.world_size)]
        self._abort = AbortFlagHandle.create()
        board = RankBoard(config, expert_shape)
        self.board: RankBoard | None = board
        """None once the processes have ended."""
        self._meeting_place: MeetingPlace | None = None
        self._tensor_groups: list[SharedMemoryGroup] = []
        self._pipeline_groups: list[SharedMemoryGroup] = []
        if shares_memory:
            self._tensor_groups = _make_groups(num_stages, tensor_size)
            self._pipeline_groups = _make_groups(tensor_size, num_stages)
        else:
            self._meeting_place = MeetingPlace.create()
        self.pidfds: list[int] = []
        """Each becomes readable when its process ends. Empty in a sandbox without pidfds, where processes are
        polled."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped_ranks: set[int] = set()
        handles: list[_Handle] = [self.calls, *self.responses, self._abort, board]
        handles += [*self._tensor_groups, *self._pipeline_groups]
        if self._meeting_place is not None:
            handles.append(self._meeting_place)
        self._finalizer = weakref.finalize(self, _end, self._processes, handles, self.pidfds)
        try:
            for rank in range(parallel.world_size):
                self._start(rank, config, max_model_len, board.descriptor)
        except BaseException:
            self._finalizer()
            raise

    @property
    def can_reset_groups(self) -> bool:
        """Whether ranks that wait for a failed one can be freed. Those in torch.distributed cannot."""
        return self._meeting_place is None

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def find_dead(self) -> str | None:
        """Which rank has ended, or is stopped in two calls in a row: a single one may be a terminal's Ctrl-Z."""
        for rank, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                return f"worker rank {rank} (process {process.pid}) {how_it_ended(code)}"
        stopped = {rank for rank, process in enumerate(self._processes) if is_stopped(process.pid)}
        hung, self._stopped_ranks = stopped & self._stopped_ranks, stopped
        for rank in hung:
            return f"worker rank {rank} (process {self._processes[rank].pid}) is stopped"
        return None

    def reset_groups(self) -> None:
        """Make the groups usable again after an abort, when every rank has stopped using them."""
        for group in (*self._tensor_groups, *self._pipeline_groups):
            group.reset()
        flag = AbortFlag(self._abort)
        flag.reset()
        flag.close()

    def wait(self, seconds: float) -> None:
        """Wait until they end by themselves, for so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(seconds, 0))

    def end(self) -> None:
        """Kill those that still run, and close every descriptor. Idempotent."""
        self._finalizer()
        self.board = None  # its memory is unmapped when nothing refers to it

    def _start(self, rank: int, config: EngineCoreConfig, max_model_len: int, board: int) -> None:
        state = ParallelState(rank=rank, tensor_parallel_size=config.parallel.tensor_parallel_size)
        arguments = WorkerArguments(
            config=config,
            max_model_len=max_model_len,
            rank=rank,
            calls=self.calls,
            responses=self.responses[rank],
            abort=self._abort,
            board=board,
            tensor_group=self._tensor_groups[state.stage] if self._tensor_groups else None,
            pipeline_group=self._pipeline_groups[state.tensor_rank] if self._pipeline_groups else None,
            expert_group=self._expert_group,
            meeting_place=self._meeting_place,
            parent_pid=os.getpid(),
            kill_with_parent=threading.current_thread() is threading.main_thread(),
        )
        process = start_module("quire_engine.worker.worker_process", arguments, pass_fds=arguments.descriptors())
        self._processes.append(process)
        with contextlib.suppress(OSError):
            self.pidfds.append(os.pidfd_open(process.pid))


def _make_groups(number: int, size: int) -> list[SharedMemoryGroup]:
    return [SharedMemoryGroup.create(size) for _ in range(number)] if size > 1 else []


def _end(processes: "list[subprocess.Popen[bytes]]", handles: list[_Handle], pidfds: list[int]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    for handle in handles:
        handle.close()
    for descriptor in pidfds:
        os.close(descriptor)
