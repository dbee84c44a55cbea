"""RayExecutor: one Ray actor per rank, for an engine that spans several machines.

::

    engine core ── calls, as msgpack ──► actor of every rank ─► Worker ◄── torch.distributed ──► the other ranks
                ◄── results, as msgpack ── actor of the output rank

`RAY_ADDRESS` names the cluster. Without it a small one is started on this machine, which ends with this process. The
ranks are placed as close together as the cluster allows. They listen on loopback if all are on one machine, and else on
their machines' addresses; Ray's own processes listen on all addresses (and require a token). So a cluster belongs in a
network of its own. Ray reserves a GPU for each rank that computes on one.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire_engine.config import EngineCoreConfig
from quire_engine.device.placement import has_cuda, on_device, prepare_device
from quire_engine.distributed import ParallelState
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.executor.base import Executor
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput, UsesGpu, WorkerCall
from quire_engine.models.served import read_checkpoint
from quire_engine.system.extras import install_command
from quire_engine.system.log_lines import log_to_stderr
from quire_engine.worker.arguments import rank_state

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PLACEMENT_SECONDS = 60.0
"""Timeout of finding room for all ranks."""
POLL_SECONDS = 1.0
TEMP_DIR_PREFIX = "quire-ray-"
LONGEST_TEMP_DIR = 43
"""Bytes in the path of a cluster's folder: Ray's sockets add 64, and a socket's path has at most 107."""
SHORT_ROOT = "/tmp"
"""The folder's place if the temporary folder's path is too long, as it always is in processes of `quire serve`."""
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray accepts: nothing is kept there."""


class RayExecutor(Executor):
    """Starts the actors, calls them, and collects their answers.

    Raises:
        EngineError: Ray is not installed, or the cluster has no room.
        ValueError: as a worker raises it.
    """

    def __init__(self, config: EngineCoreConfig, max_model_len: int) -> None:
        try:
            import ray
        except ImportError:
            raise EngineError(
                "distributed_executor_backend is 'ray', and Ray is not installed; install it with: "
                + install_command("ray")
            ) from None
        self._ray = ray
        self._config = config
        self.num_stages = config.parallel.pipeline_parallel_size
        self._encoder = msgspec.msgpack.Encoder()
        self._output_rank = rank_state(config.parallel).output_rank
        self._submitted: deque[list[Any]] = deque()
        self._actors: list[Any] = []
        self._placement_group: Any = None
        self._temp_dir: tempfile.TemporaryDirectory[str] | None = None
        self._is_owner = False
        try:
            self._connect()
            self._uses_gpu = self._choose_device()
            self._place()
            self._start(max_model_len)
            self.async_scheduling = config.async_scheduling(uses_gpu=all(self.collective_rpc(UsesGpu())))
        except BaseException:
            self.shutdown()
            raise

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        message = self._encoder.encode(scheduler_output)
        self._submitted.append([actor.execute_model.remote(message) for actor in self._actors])

    def collect(self) -> ModelRunnerOutput:
        results = self._results(self._submitted.popleft(), is_step=True)
        return msgspec.msgpack.decode(results[self._output_rank], type=ModelRunnerOutput)

    def collective_rpc(self, call: WorkerCall) -> list[int]:
        message = self._encoder.encode(call)
        return self._results([actor.call.remote(message) for actor in self._actors])

    def shutdown(self) -> None:
        if not self._ray.is_initialized():
            return
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it may be dead, or the cluster may be
                self._ray.kill(actor)
        self._actors = []
        if self._placement_group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._placement_group)
            self._placement_group = None
        if self._is_owner:
            self._ray.shutdown()
        if self._temp_dir is not None:
            self._temp_dir.cleanup()

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return  # the program that uses the engine has its own
        self._is_owner = True
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"configure_logging": False, "log_to_driver": True}
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            _remove_left_behind()
            self._temp_dir = _make_folder()
            options |= {
                "address": "local",
                "num_cpus": self._config.parallel.world_size,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": self._temp_dir.name,
                "_node_ip_address": LOOPBACK,
            }
        with _keep_signal_handlers():
            self._ray.init(**options)

    def _choose_device(self) -> bool:
        """Whether the ranks compute on GPUs: with device 'auto', if the cluster has some and torch supports them."""
        device = self._config.parallel.device
        if device == "auto":
            return has_cuda() and bool(self._ray.cluster_resources().get("GPU"))  # type: ignore[no-untyped-call]
        return device == "cuda"

    def _place(self) -> None:
        """Reserve a CPU in the cluster for each rank, and a GPU if it computes on one. Raises EngineError if the
        cluster has no room."""
        world_size = self._config.parallel.world_size
        bundle = {"CPU": 1.0, "GPU": 1.0} if self._uses_gpu else {"CPU": 1.0}
        self._placement_group = self._ray.util.placement_group([bundle] * world_size, strategy="PACK")
        if not self._placement_group.wait(PLACEMENT_SECONDS):
            room, mend = "one CPU each", "add machines or free CPUs"
            if self._uses_gpu:
                room, mend = "one CPU and one GPU each", "add machines, free GPUs, or set device to 'cpu'"
            raise EngineError(f"the Ray cluster has no room for {world_size} ranks of {room}; {mend}")

    def _start(self, max_model_len: int) -> None:
        """Start the actors, let the ranks meet at rank 0, and load the model."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor_class = self._ray.remote(RayWorker)
        parallel = replace(self._config.parallel, device="cuda" if self._uses_gpu else "cpu")
        config = replace(self._config, parallel=parallel)
        for rank in range(self._config.parallel.world_size):
            self._actors.append(
                actor_class.options(
                    num_cpus=1,
                    num_gpus=int(self._uses_gpu),
                    max_restarts=0,
                    scheduling_strategy=strategy(self._placement_group, placement_group_bundle_index=rank),
                ).remote()
            )
        hosts = self._results([actor.host.remote() for actor in self._actors])
        single = all(host == hosts[0] for host in hosts)
        (port,) = self._results([self._actors[0].free_port.remote()])
        init_method, interface = f"tcp://{LOOPBACK if single else hosts[0]}:{port}", "lo" if single else None
        starting = []
        for rank, actor in enumerate(self._actors):
            arguments = RayWorkerArguments(config, max_model_len, rank, init_method, interface)
            starting.append(actor.start.remote(self._encoder.encode(arguments)))
        self._results(starting)

    def _results(self, references: list[Any], is_step: bool = False) -> list[Any]:
        """Wait for the answers of several ranks.

        Raises:
            EngineDeadError: an actor or its GPU is lost, or one of several ranks failed in a step: the others may wait
                for it forever.
            Exception: what the only rank raised, or one of several in a call.
        """
        waiting = list(references)
        while waiting:
            ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=POLL_SECONDS)
            for reference in ready:
                self._raise_error(reference, references.index(reference), is_step)
        results: list[Any] = self._ray.get(references)
        return results

    def _raise_error(self, reference: Any, rank: int, is_step: bool) -> None:
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            raise EngineDeadError(f"rank {rank} is gone: {str(error).splitlines()[0]}") from None
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineError | ValueError | OSError) and not is_step:
                raise cause from None
            if self._config.parallel.world_size == 1:
                raise cause from error
            raise EngineDeadError(f"rank {rank} failed: {cause!r}") from error


class RayWorkerArguments(msgspec.Struct):
    """Arguments of a rank's actor."""

    config: EngineCoreConfig
    max_model_len: int
    rank: int
    init_method: str
    """Where the ranks meet."""
    interface: str | None
    """The network interface that they listen on; None: that of the machine's address."""


class RayWorker:
    """The actor of one rank: a `Worker`, called with bytes."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._device = torch.device("cpu")
        self._encoder = msgspec.msgpack.Encoder()
        self._call_decoder = msgspec.msgpack.Decoder[WorkerCall](WorkerCall)
        self._step_decoder = msgspec.msgpack.Decoder(SchedulerOutput)

    def host(self) -> str:
        """Address of this machine in the cluster."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    def free_port(self) -> int:
        """A free port, for the ranks to meet at."""
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def start(self, message: bytes) -> None:
        """Meet the other ranks, and load the model; the message is a `RayWorkerArguments`."""
        from quire_engine.distributed.torch_distributed import initialize_parallel_state
        from quire_engine.worker import Worker

        arguments = msgspec.msgpack.decode(message, type=RayWorkerArguments)
        config = arguments.config
        # Ray sets this to the one CPU that it has reserved; the worker decides how many threads compute.
        os.environ.pop("OMP_NUM_THREADS", None)
        log_to_stderr(f"quire worker[rank {arguments.rank}, %(process)d] %(levelname)s: %(message)s")
        parallel, state = config.parallel, ParallelState()
        checkpoint = read_checkpoint(Path(config.model.model), config.model.model_impl)
        self._device = prepare_device(config, checkpoint.dtype, rank=0)  # Ray lets it see only its own GPU
        if parallel.world_size > 1:
            state = initialize_parallel_state(
                rank=arguments.rank,
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
                init_method=arguments.init_method,
                device=self._device,
                interface=arguments.interface,
            )
        with on_device(self._device):
            self._worker = Worker(config, checkpoint, arguments.max_model_len, state, self._device)

    def execute_model(self, message: bytes) -> bytes:
        """`Worker.execute_model` with an encoded `SchedulerOutput`; returns the encoded `ModelRunnerOutput`."""
        with on_device(self._device):
            return self._encoder.encode(self._worker.execute_model(self._step_decoder.decode(message)))

    def call(self, message: bytes) -> int:
        """`Worker.call` with an encoded `WorkerCall`."""
        with on_device(self._device):
            answer: int = self._worker.call(self._call_decoder.decode(message))
            return answer


def _make_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for a cluster, with a path short enough for Ray's sockets."""
    prefix = f"{TEMP_DIR_PREFIX}{os.getpid()}-"
    for root in (tempfile.gettempdir(), SHORT_ROOT):
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True)
        if len(os.fsencode(folder.name)) <= LONGEST_TEMP_DIR:
            break
        folder.cleanup()
    return folder


def _remove_left_behind() -> None:
    for root in {tempfile.gettempdir(), SHORT_ROOT}:
        for folder in Path(root).glob(f"{TEMP_DIR_PREFIX}*"):
            pid = folder.name.removeprefix(TEMP_DIR_PREFIX).partition("-")[0]
            if not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread, where Ray does not replace it either
            signal.signal(signal.SIGTERM, before)
