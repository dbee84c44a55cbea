"""TritonPythonModel: the five calls of the server's Python stub."""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire_engine.config import EngineConfig
from quire_engine.errors import EngineError
from quire_engine.models.served import read_checkpoint
from quire_engine.stats import FinishedRequestStats, StatLogger
from quire_engine.system.process_state import started_at
from quire_monitoring import ByEngine, MetricDefinition, ReplicaStatLoggers, TritonStatLogger
from quire_monitoring.ended_requests import EndedRequestLog
from quire_monitoring.triton import MetricFamily

from quire_backend import model_config, triton_api
from quire_backend.engine_number import EngineNumber
from quire_backend.private_memory import make_private
from quire_backend.serving import Serving
from quire_backend.settings import TOKEN_VARIABLE, load_engine_config, name_of_settings, one_line
from quire_backend.status_page import StatusPage
from quire_backend.triton_api import TritonRequest

if TYPE_CHECKING:
    from quire_engine.async_llm import AsyncLLM
    from quire_monitoring.otel import OtelStatLogger

__all__ = ["TritonPythonModel"]

logger = logging.getLogger(__name__)


def make_engine(config: EngineConfig, stat_loggers: Sequence[StatLogger]) -> "AsyncLLM":
    """Start the engine; imported only now, because completing a configuration should not load torch."""
    from quire_engine.async_llm import AsyncLLM

    return AsyncLLM(config, stat_loggers)


def expert_shape(config: EngineConfig) -> tuple[int, int] | None:
    """Layers and experts of the model; None if it has none, or cannot be read: the engine then says why."""
    try:
        return read_checkpoint(Path(config.model.model), config.model.model_impl).expert_shape
    except EngineError:
        return None


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
        raise ValueError(f"otlp_endpoint needs the extra otel: pip install 'quire[otel]' ({error})") from None
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

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Complete `config.pbtxt`, which only needs `backend: "quire"`."""
        model_config.complete(auto_complete_model_config)
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine with the settings of `model.json`.

        Raises:
            TritonModelException: the model cannot be served; the message says why in one line.
        """
        triton_api.install_log_handler()
        self._ending = threading.Lock()
        failure = None
        try:
            make_private()
            self._start(args)
        except (EngineError, ValueError, OSError) as error:
            failure = one_line(error)
        except Exception as error:
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
        os.environ.pop(TOKEN_VARIABLE, None)  # the engine's processes inherit the environment, and do not need it
        replicas = range(config.parallel.data_parallel_size)
        self._numbers = [EngineNumber(args["model_name"], args["model_version"]) for _ in replicas]
        if config.scheduler.scheduling_policy == "priority":
            logger.warning(
                "Triton's own request priority does not reach a Python backend, and has no effect: "
                "clients say priority in sampling_parameters, or over HTTP as a parameter of generate"
            )
        pbtxt = json.loads(args["model_config"])
        labels = {"model": args["model_name"], "version": args["model_version"]}
        all_labels = [{**labels, "engine": number.label} for number in self._numbers]
        loggers = [
            TritonStatLogger(
                family_maker(config, pbtxt),
                own_labels,
                slo_classes=config.frontend.slo,
                num_ranks=config.parallel.world_size,
                max_draft_tokens=config.scheduler.max_draft_tokens,
                expert_shape=expert_shape(config),
                expert_metrics=config.frontend.expert_metrics,
                aliases=config.frontend.metric_aliases == "vllm",
                server_start_time=started_at(os.getppid()),
                settings=name_of_settings(config),
            )
            for own_labels in all_labels
        ]
        self._metrics = ReplicaStatLoggers(loggers)
        otels = [make_otel(config, own_labels) for own_labels in all_labels]
        self._otels = [otel for otel in otels if otel is not None]
        frontend = config.frontend
        self._ended_requests = EndedRequestLog(
            frontend.ended_requests, frontend.slo, keep_text=frontend.ended_requests_text
        )
        stat_loggers: list[StatLogger] = [self._metrics, self._ended_requests]
        if self._otels:
            stat_loggers.append(ByEngine(self._otels))
        engine = make_engine(config, stat_loggers)
        status = StatusPage.of_run(
            model=labels["model"], version=labels["version"], instance=args["model_instance_name"],
            num_instances=model_config.num_instances(pbtxt),
        )  # fmt: skip
        self._serving = Serving(
            engine,
            config.frontend,
            on_rejected=self._record_rejection,
            when_counted=self._metrics.when_written,
            ended_requests=self._ended_requests,
            model=labels["model"],
            version=labels["version"],
            status=status,
            on_asked_to_end=self._end,
        )
        try:
            self._serving.start()
        except BaseException:
            engine.shutdown()
            if status is not None:
                status.close()
            raise
        self._metrics.start(
            is_up=engine.is_engine_up, workers_up=engine.workers_up, cache_config=engine.cache_config_info
        )
        if config.frontend.metrics and not config.frontend.disable_log_stats:
            for otel, own in zip(self._otels, loggers, strict=False):  # all have one, or none has
                otel.start(own.totals())
        logger.info("model %s is served by the Quire engine", args["model_name"])

    def execute(self, requests: Sequence[TritonRequest]) -> None:
        """Take requests and return at once; responses are sent from other threads. Never raises."""
        for request in requests:
            self._serving.submit(request)

    def _record_rejection(self, request: FinishedRequestStats) -> None:
        self._metrics.record_rejection(None if request.slo_verdict is None else request.slo_class)
        self._ended_requests.add(request)
        if self._otels:
            self._otels[0].record_rejection(request)

    def is_ready(self) -> bool:
        """Whether the engine is up; newer servers call this."""
        return self._serving.is_ready

    def finalize(self) -> None:
        """End everything that `initialize` has started."""
        if hasattr(self, "_serving"):
            self._end()
            self._serving.shutdown()

    def _end(self) -> None:
        """End the engine and remove its metrics. Idempotent, from any thread."""
        with self._ending:
            self._serving.end_engine()
            self._stop_exporters()

    def _stop_exporters(self) -> None:
        are_gone = self._metrics.stop() if hasattr(self, "_metrics") else True
        otels: list[OtelStatLogger] = getattr(self, "_otels", [])
        while otels:
            otels.pop().stop()
        if hasattr(self, "_numbers") and are_gone:  # the next engine makes the same series
            for number in self._numbers:
                number.release()  # or else the end of this process does it
