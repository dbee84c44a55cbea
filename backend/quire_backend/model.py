"""TritonPythonModel: the calls of the stub that serves a model."""

import asyncio
import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire_engine.async_llm import AsyncLLM
from quire_engine.config import EngineConfig
from quire_engine.encoders.image_encoder import image_family
from quire_engine.errors import EngineError, is_failure
from quire_engine.models.served import read_checkpoint
from quire_engine.stats import FinishedRequestStats, StatLogger
from quire_engine.system.extras import install_command
from quire_engine.system.process_state import started_at
from quire_monitoring.definitions import MetricDefinition, MetricsConfig
from quire_monitoring.ended_requests import EndedRequestLog
from quire_monitoring.triton import MetricFamily, TritonStatLogger

from quire_backend import model_config, triton_api
from quire_backend.exporters import EngineExporters, EngineNumber
from quire_backend.private_memory import make_private
from quire_backend.serving import Serving
from quire_backend.settings import TOKEN_VARIABLE, load_engine_config, name_of_settings, one_line
from quire_backend.status_page import StatusPage, run_folder
from quire_backend.triton_api import TritonRequest

if TYPE_CHECKING:
    from quire_monitoring.otel import OtelStatLogger

logger = logging.getLogger(__name__)


def make_engine(config: EngineConfig, stat_loggers: Sequence[StatLogger]) -> AsyncLLM:
    """Start the engine."""
    return AsyncLLM(config, stat_loggers)


def expert_shape(config: EngineConfig) -> tuple[int, int] | None:
    """Layers and experts of the model; None if it has none, or cannot be read: the engine then says why."""
    try:
        return read_checkpoint(Path(config.model.model), config.model.model_impl).expert_shape
    except EngineError:
        return None


def takes_images(config: EngineConfig) -> bool:
    """Whether prompts may have images; a checkpoint that cannot be read counts as one that takes none, likewise."""
    try:
        return image_family(config) is not None
    except EngineError:
        return False


def make_otel(config: EngineConfig, labels: Mapping[str, str]) -> "OtelStatLogger | None":
    """The exporter for the setting `otlp_endpoint`, if it is set.

    Raises:
        ValueError: its packages are not installed.
    """
    endpoint = config.frontend.otlp_endpoint
    if endpoint is None:
        return None
    try:
        from quire_monitoring.otel import OtelStatLogger
    except ImportError as error:
        raise ValueError(f"otlp_endpoint needs the extra otel ({error}): {install_command('otel')}") from None
    return OtelStatLogger(endpoint, labels, trace_sample_ratio=config.frontend.otlp_trace_sample_ratio)


def family_maker(config: EngineConfig, pbtxt: Mapping[str, Any]) -> Callable[[MetricDefinition], MetricFamily | None]:
    """Makes the families of custom metrics; where they are switched off, it raises, and says by what.

    Args:
        config: all settings.
        pbtxt: the model's configuration.

    Raises:
        ValueError: the configuration cannot be understood.
    """
    switches = {
        "the setting metrics": not config.frontend.metrics,
        "the setting disable_log_stats": config.frontend.disable_log_stats,
        "REPORT_CUSTOM_METRICS in config.pbtxt": not model_config.reports_metrics(pbtxt),
    }
    off = [name for name, is_off in switches.items() if is_off]

    def no_family(definition: MetricDefinition) -> NoReturn:
        raise RuntimeError(f"they are switched off by {off[0]}")

    return no_family if off else triton_api.metric_family


class TritonPythonModel:
    """One instance serves all requests of the model: the engine does the batching."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine with the settings of `model.json`.

        Raises:
            TritonModelException: the model cannot be served; the message says why in one line.
        """
        triton_api.install_log_handler()
        triton_api.install_serializer()
        self._ending = threading.Lock()
        failure = None
        try:
            make_private()
            self._start(args)
        except (EngineError, ValueError, OSError) as error:
            failure = one_line(error)
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.exception("model %s could not be loaded", args["model_name"])
            failure = f"{type(error).__name__}: {one_line(error)}"
        if failure is not None:
            self._stop_exporters()
            # Raised here, and not in the handlers, so that tritonserver's report holds no chain of tracebacks.
            raise triton_api.load_error(failure)

    def _start(self, args: dict[str, str]) -> None:
        config = load_engine_config(
            Path(args["model_repository"]) / args["model_version"],
            args["model_instance_kind"],
            int(args["model_instance_device_id"]),
        )
        if args["model_name"] in config.lora.lora_modules:
            raise ValueError(f"lora_modules has {args['model_name']!r}, the model's own name; choose another")
        os.environ.pop(TOKEN_VARIABLE, None)  # the engine's processes inherit the environment, and do not need it
        if config.scheduler.scheduling_policy == "priority":
            logger.warning(
                "Triton's own request priority does not reach a Python backend, and has no effect: "
                "clients say priority in sampling_parameters, or over HTTP as a parameter of generate"
            )
        self._parallel = config.parallel
        pbtxt = json.loads(args["model_config"])
        num_instances = model_config.num_instances(pbtxt)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        frontend, make_family = config.frontend, family_maker(config, pbtxt)

        metrics_config = MetricsConfig(
            slo_classes=frontend.slo,
            num_ranks=config.parallel.world_size,
            max_draft_tokens=config.scheduler.max_draft_tokens,
            expert_shape=expert_shape(config),
            expert_metrics=frontend.expert_metrics,
            settings=name_of_settings(config),
            max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
            takes_images=takes_images(config),
            aliases=frontend.metric_aliases == "vllm",
        )

        def make_metrics(number: str) -> TritonStatLogger:
            return TritonStatLogger(
                make_family,
                {**labels, "engine": number},
                metrics_config,
                server_start_time=started_at(os.getppid()),
            )

        self._exporters = EngineExporters(
            lambda index: EngineNumber(labels["model"], labels["version"], index),
            make_metrics,
            lambda number: make_otel(config, {**labels, "engine": number}),
            sends_totals=frontend.metrics and not frontend.disable_log_stats,
            num_engines=config.parallel.data_parallel_size,
        )
        self._ended_requests = EndedRequestLog(
            frontend.ended_requests, frontend.slo, keep_text=frontend.ended_requests_text, folder=run_folder(),
            owner=(labels["model"], labels["version"], args["model_instance_name"]),
        )  # fmt: skip
        if self._ended_requests.lost:
            self._exporters.record_lost(self._ended_requests.lost)
        engine = self._engine = make_engine(config, [self._exporters, self._ended_requests])
        status = StatusPage.of_run(
            model=labels["model"], version=labels["version"], instance=args["model_instance_name"],
            num_instances=num_instances,
        )  # fmt: skip
        self._serving = Serving(
            engine,
            config.frontend,
            on_rejected=self._record_rejection,
            when_counted=self._exporters.when_written,
            scale=self._scale,
            ended_requests=self._ended_requests,
            model=labels["model"],
            version=labels["version"],
            status=status,
            on_asked_to_end=self._end,
            max_queued_requests=config.scheduler.max_queued_requests,
            num_instances=num_instances,
        )
        try:
            self._serving.start()
        except BaseException:
            engine.shutdown()
            if status is not None:
                status.close()
            raise
        self._exporters.start(engine.is_engine_up, engine.workers_up, engine.cache_config_info)
        if config.parallel.has_remote_replicas:
            engine.watch_replicas(self._on_replicas_changed)
        gc.collect()
        gc.freeze()  # else a full collection walks all imported objects: 0.2 s in which no response goes out
        logger.info("model %s is served by the Quire engine", args["model_name"])

    def execute(self, requests: Sequence[TritonRequest]) -> None:
        """Take requests and return at once; responses are sent from other threads. Never raises."""
        for request in requests:
            self._serving.submit(request)

    def _record_rejection(self, request: FinishedRequestStats) -> None:
        self._exporters.record_rejection(request)
        self._ended_requests.add(request)

    async def _scale(self, num_replicas: int) -> None:
        """Have so many replicas, and exporters for each of them.

        Raises:
            ScalingError: it cannot be, or not now; nothing has changed then.
        """
        self._exporters.expect([self._parallel.local_rank(number) for number in range(num_replicas)])
        try:
            await self._engine.scale(num_replicas)
        finally:
            await asyncio.to_thread(self._exporters.match, lambda: self._engine.replica_indices)

    def _on_replicas_changed(self) -> None:
        """An engine of another host has come, or has gone. Returns at once: the server may take a while for series."""
        self._exporters.expect(self._engine.replica_indices)
        arguments = (lambda: self._engine.replica_indices,)
        threading.Thread(target=self._exporters.match, args=arguments, name="quire-series", daemon=True).start()

    def is_ready(self) -> bool:
        """Whether the engine is up; newer servers call this."""
        return self._serving.is_ready

    def finalize(self) -> None:
        """End everything that `initialize` has started."""
        if hasattr(self, "_serving"):
            try:
                self._end()
            finally:
                self._serving.shutdown()
                self._ended_requests.close()

    def _end(self) -> None:
        """End the engine and remove its metrics. Idempotent, from any thread."""
        with self._ending:
            self._serving.end_engine()
            self._stop_exporters()

    def _stop_exporters(self) -> None:
        if hasattr(self, "_exporters"):
            self._exporters.stop()
