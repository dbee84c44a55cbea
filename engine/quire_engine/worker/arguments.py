"""Arguments of a worker's process, and what it inherits. All else comes through its queue, as `messages`."""

import msgspec

from quire_engine.config import EngineCoreConfig, ParallelConfig
from quire_engine.distributed import ParallelState
from quire_engine.distributed.shared_memory import AbortFlagHandle, MeetingPlace, SharedMemoryGroup
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.ipc.message_queue import MessageQueueHandle


def rank_state(parallel: ParallelConfig, rank: int = 0) -> ParallelState:
    """A rank's place by the settings, without groups."""
    return ParallelState(
        rank=rank,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
    )


class WorkerArguments(msgspec.Struct):
    """One line of JSON on the worker's stdin."""

    config: EngineCoreConfig
    max_model_len: int
    rank: int
    calls: MessageQueueHandle
    responses: MessageQueueHandle
    abort: AbortFlagHandle
    board: int
    """Descriptor of the `RankBoard`."""
    tensor_group: SharedMemoryGroup | None
    pipeline_group: SharedMemoryGroup | None
    expert_group: LockstepHandle | None
    """Where the ranks of all engines meet that share the experts; None if they are not shared."""
    meeting_place: MeetingPlace | None
    """Where the ranks form groups of torch.distributed, instead of tensor and pipeline group."""
    parent_pid: int
    kill_with_parent: bool
    """Whether the kernel kills the worker when the thread that started it ends."""

    def descriptors(self) -> list[int]:
        """All that the worker inherits, and no more: a sibling would hold open what a dead rank leaves."""
        tensor_size = self.config.parallel.tensor_parallel_size
        found = [*self.calls.descriptors(self.rank), *self.responses.descriptors(0), *self.abort.descriptors()]
        found.append(self.board)
        if self.config.cache.kv_memory is not None:
            found.append(self.config.cache.kv_memory)
        if self.tensor_group is not None:
            found += self.tensor_group.descriptors(self.rank % tensor_size)
        if self.pipeline_group is not None:
            found += self.pipeline_group.descriptors(self.rank // tensor_size)
        if self.expert_group is not None:
            found += self.expert_group.descriptors()
        if self.meeting_place is not None:
            found.append(self.meeting_place.descriptor)
        return found
