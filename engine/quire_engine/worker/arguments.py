"""Arguments of a worker's process. Everything else it receives through its queue; see `messages`."""

import msgspec

from quire_engine.config import EngineCoreConfig
from quire_engine.distributed.meeting import MeetingPlace
from quire_engine.distributed.shared_memory import AbortFlagHandle, SharedMemoryGroup
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.ipc.message_queue import MessageQueueHandle

__all__ = ["WorkerArguments"]


class WorkerArguments(msgspec.Struct):
    """One line of JSON on the worker's stdin."""

    config: EngineCoreConfig
    max_model_len: int
    rank: int
    calls: MessageQueueHandle
    responses: MessageQueueHandle
    abort: AbortFlagHandle
    busy_time: int
    """Descriptor of the memory of `BusyTime`, shared by all ranks."""
    expert_load: int | None
    """Likewise of `ExpertLoad`; None if the model has no experts."""
    kv_transfers: int | None
    """Likewise of `TransferBoard`; None without a KV connector."""
    tensor_group: SharedMemoryGroup | None
    pipeline_group: SharedMemoryGroup | None
    expert_group: LockstepHandle | None
    """Where the ranks of all engines meet that share the experts; None if they are not shared."""
    meeting_place: MeetingPlace | None
    """Where the ranks form groups of torch.distributed, instead of tensor and pipeline group."""
    parent_pid: int
    kill_with_parent: bool
    """Whether the kernel kills the worker when the thread that started it ends."""
