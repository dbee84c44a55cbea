"""A stand-in for the server's Python module, and an engine that a test drives by hand."""

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from quire_engine.errors import CheckpointError, RequestError, UnknownAdapterError
from quire_engine.frontend.chat_template import Conversation
from quire_engine.frontend.default_sampling_params import DefaultSamplingParams
from quire_engine.frontend.input_processor import NOT_SAMPLED
from quire_engine.lora import Adapter, AdapterInfo, LoRARequest
from quire_engine.outputs import CompletionOutput, RequestOutput
from quire_engine.pooling import Pooled, PoolingInfo
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams


class FakeError:
    INVALID_ARG, NOT_FOUND, UNAVAILABLE, CANCELLED, INTERNAL = (
        "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "INTERNAL",
    )  # fmt: skip

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class FakeTensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class FakeResponse:
    def __init__(self, output_tensors: list[FakeTensor] = (), error: FakeError | None = None) -> None:  # type: ignore[assignment]
        self.error = error
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}

    @property
    def text(self) -> str:
        return b"".join(self.tensors["text_output"]).decode()


class FakeFamily:
    GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> SimpleNamespace:  # noqa: N802
        ignore = lambda value: None  # noqa: E731
        return SimpleNamespace(set=ignore, increment=ignore, observe=ignore)


class FakeSender:
    """Collects responses; `cancelled` is what the server would say."""

    def __init__(self) -> None:
        self.responses: list[FakeResponse] = []
        self.finals: list[bool] = []
        self.cancelled = False
        self.fail_after: int | None = None
        self.misused = False
        self._changed = threading.Condition()

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        with self._changed:
            if self.fail_after is not None and len(self.responses) >= self.fail_after and not flags:
                raise RuntimeError("the client is gone")
            self.misused |= self.finished
            if response is not None:  # else the flag alone
                self.responses.append(response)
            self.finals.append(flags == 1)
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        self.misused |= self.finished  # the server would read freed memory
        return self.cancelled

    @property
    def finished(self) -> bool:
        return bool(self.finals) and self.finals[-1]

    def wait(self, condition: Callable[[], bool] | None = None) -> list[FakeResponse]:
        """The responses, once the last one (or what `condition` says) is there."""
        with self._changed:
            assert self._changed.wait_for(condition or (lambda: self.finished), timeout=60), self.responses
            return self.responses


class FakeRequest:
    def __init__(self, tensors: dict[str, np.ndarray], parameters: dict[str, Any] | None = None) -> None:
        self._tensors = tensors
        self._parameters = parameters or {}
        self.sender = FakeSender()
        self.timeout_us = 0

    def inputs(self) -> list[FakeTensor]:
        return [FakeTensor(name, array) for name, array in self._tensors.items()]

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def request_id(self) -> str:
        return "label"

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> FakeSender:
        return self.sender


NUMPY_TYPES = {"max_tokens": np.int32, "min_tokens": np.int32, "top_k": np.int32, "logprobs": np.int32,
               "temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint64,
               "input_ids": np.int32, "input_lengths": np.int32, "dimensions": np.int32, "prompt_embeds": np.float32,
               "stop_token_ids": np.int32, "n": np.int32}  # fmt: skip


def make_request(parameters: dict[str, Any] | None = None, /, **inputs: Any) -> FakeRequest:
    """A request with inputs of the types that the model's configuration gives them."""
    tensors = {}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        if name in ("sampling_parameters", "pooling_parameters", "embedding_request") and isinstance(value, dict):
            values = [json.dumps(value)]
        if values and isinstance(values[0], str | bytes):
            values = [item.encode() if isinstance(item, str) else item for item in values]
            tensors[name] = np.array(values, dtype=np.object_)
        else:
            tensors[name] = np.array(values, dtype=NUMPY_TYPES.get(name, np.bool_))
    return FakeRequest(tensors, parameters)


@dataclass
class FakeAdapters:
    """As much of AdapterRegistry as the backend touches."""

    infos: dict[str, AdapterInfo] = field(default_factory=dict)
    is_enabled: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.infos)

    def add(self, name: str, folder: str) -> None:
        self.is_enabled = True
        self.infos[name] = AdapterInfo(
            name=name, folder=folder, digest=f"digest of {folder}", rank=8, num_bytes=64, target_modules=["q_proj"]
        )

    def find(self, request: LoRARequest | None) -> Adapter:
        assert request is not None
        if request.lora_name not in self.infos:
            raise UnknownAdapterError("lora_name", f"lora_name is {request.lora_name!r}; there is no such adapter")
        info = self.infos[request.lora_name]
        return Adapter(info.name, info.folder, info.digest, info.is_pinned)


@dataclass
class FakeEngine:
    """As much of AsyncLLM as the backend touches. Prompts are tokenized as one id per character."""

    is_healthy: bool = True
    dead_error: str | None = None
    outage: str | None = None
    partial_outage: str | None = None
    chat_template: str | None = "[TOOL_CALLS]"
    num_replicas: int = 1
    num_remote_replicas: int | None = None
    default_sampling_params: DefaultSamplingParams = field(default_factory=DefaultSamplingParams)
    pooling_info: PoolingInfo = field(default_factory=lambda: PoolingInfo(embedding_size=4))
    adapters: FakeAdapters = field(default_factory=FakeAdapters)
    events: list[str] = field(default_factory=list)
    num_processed: int = 0
    priorities: list[int | None] = field(default_factory=list)
    added: list[Any] = field(default_factory=list)
    sinks: dict[str, Callable[[RequestOutput], None]] = field(default_factory=dict)
    on_add: Callable[["FakeEngine", str], None] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def input_processor(self) -> "FakeEngine":
        return self

    max_model_len = 64
    images = None

    def apply_chat_template(self, conversation: Conversation) -> list[int]:
        return self.tokenize(conversation.messages[0]["content"], add_special_tokens=False)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def token_strings(self, token_ids: list[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.token_strings(token_ids))

    def cache_config_info(self, engine_index: int) -> dict[str, str]:
        return {"block_size": "16", "num_gpu_blocks": "64"}

    async def add_lora(self, lora_request: LoRARequest) -> None:
        if lora_request.lora_path == "/none":
            raise CheckpointError("/none: there is no such folder; lora_path must name the folder of an adapter")
        self.adapters.add(lora_request.lora_name, lora_request.lora_path)

    async def remove_lora(self, lora_name: str) -> None:
        self.adapters.find(LoRARequest(lora_name))
        del self.adapters.infos[lora_name]

    async def pin_lora(self, lora_name: str) -> None:
        self.adapters.find(LoRARequest(lora_name))
        self.adapters.infos[lora_name].is_pinned = True

    async def list_loras(self) -> list[AdapterInfo]:
        return list(self.adapters.infos.values())

    def is_engine_up(self, engine_index: int) -> bool:
        return self.is_healthy

    def workers_up(self, engine_index: int) -> list[bool]:
        return [self.is_healthy]

    def process(
        self,
        prompt: Any,
        params: SamplingParams = NOT_SAMPLED,
        request_id: str | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        priority: int | None = None,
    ) -> Any:
        self.priorities.append(priority)
        if isinstance(prompt, dict) and "pair" in prompt:
            prompt = prompt["prompt"] + prompt["pair"]
        if prompt == "explode":
            raise ZeroDivisionError("by design")
        if len(prompt) == 0:
            name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            raise RequestError(name, f"{name} is empty")
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
        self.num_processed += 1
        return SimpleNamespace(request_id=f"r{self.num_processed}", prompt_token_ids=ids, sampling_params=params,
                               options=options, prompt=prompt if isinstance(prompt, str) else None)  # fmt: skip

    def add_request(self, request: Any, on_output: Callable[[RequestOutput], None]) -> None:
        with self.changed:
            self.events.append("add")
            self.added.append(request)
            self.sinks[request.request_id] = on_output
            self.changed.notify_all()
        if self.on_add:
            self.on_add(self, request.request_id)

    def emit(self, request_id: str, text: str = "", finish_reason: str | None = None, **fields: Any) -> None:
        """One delta of one token per character."""
        completion = CompletionOutput(text=text, token_ids=[ord(c) for c in text], finish_reason=finish_reason)
        output = RequestOutput(request_id, "Hi", [1, 2], [completion], finished=finish_reason is not None, **fields)
        sink = self.sinks[request_id] if not output.finished else self.sinks.pop(request_id)
        sink(output)

    def emit_vector(self, request_id: str, *rows: list[float], tokens: int = 3, **fields: Any) -> None:
        """The end of a request for a vector; several rows are those of tokens."""
        array = np.array(rows if len(rows) > 1 else rows[0], np.float32)
        output = RequestOutput(
            request_id, None, [1] * tokens, [CompletionOutput(finish_reason="stop")], finished=True,
            pooled=Pooled(array.tobytes(), array.shape), **fields,
        )  # fmt: skip
        self.sinks.pop(request_id)(output)

    def abort(self, request_id: str, by: str = "client") -> None:
        with self.changed:
            self.events.append("abort")
            self.changed.notify_all()
        if request_id in self.sinks:
            self.emit(request_id, finish_reason="abort")

    @property
    def replica_indices(self) -> list[int]:
        return list(range(self.num_replicas))

    async def scale(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    sleep_level = 0

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        self.events.append(f"sleep {level} {mode}")
        self.sleep_level = level

    async def wake_up(self) -> None:
        self.sleep_level = 0

    async def update_weights(self, weights_path: str) -> None:
        self.events.append(f"weights {weights_path}")

    async def reset_prefix_cache(self) -> bool:
        self.events.append("reset")
        return True

    async def start(self) -> None:
        self.events.append("start")

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def wait_for(self, event: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: event in self.events, timeout=60)


def _fake_module() -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    for name, value in {
        "TritonError": FakeError, "Tensor": FakeTensor, "InferenceResponse": FakeResponse, "MetricFamily": FakeFamily,
        "TritonModelException": type("TritonModelException", (Exception,), {}),
        "serialize_byte_tensor": lambda array: b"".join(
            len(item).to_bytes(4, "little") + item for item in array.reshape(-1).tolist()
        ),
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": 1, "Logger": SimpleNamespace(log_info=print, log_warn=print,
                                                                            log_error=print,
                                                                            log_verbose=print),
    }.items():  # fmt: skip
        setattr(module, name, value)
    return module


# Before any module of the backend is imported: it exists only inside the server.
sys.modules.setdefault("triton_python_backend_utils", _fake_module())


@pytest.fixture(autouse=True)
def _own_loggers() -> Iterator[None]:
    """Loading a model redirects the packages' loggers to the server; undo that after each test."""
    yield
    for name in ("quire_backend", "quire_monitoring", "quire_engine"):
        package_logger = logging.getLogger(name)
        package_logger.handlers.clear()
        package_logger.setLevel(logging.NOTSET)
        package_logger.propagate = True


@pytest.fixture
def request_of() -> Callable[..., FakeRequest]:
    return make_request


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Callable[..., Any]]:
    """Starts a Serving over the fake engine; ends it after the test."""
    from quire_backend.serving import Serving
    from quire_engine.config import FrontendConfig

    started = []

    def start(max_queued_requests: int | None = None, **config: Any) -> Serving:
        serving = Serving(engine, FrontendConfig(**config), max_queued_requests=max_queued_requests)
        serving.start()
        started.append(serving)
        return serving

    yield start
    for serving in started:
        serving.shutdown()
