"""Operations: answers the requests for introspection, and has the engine do what operators want.

What the requests and the answers look like is in `quire_backend.introspection`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_engine.config import FrontendConfig
from quire_engine.errors import (
    CheckpointError,
    EngineDeadError,
    EngineError,
    EngineUnavailableError,
    OperationError,
    RequestError,
    ScalingError,
    quote,
)
from quire_engine.lora import LoRARequest
from quire_monitoring.ended_requests import EndedRequestLog

from quire_backend.chat_format import chat_format
from quire_backend.introspection import IntrospectionRequest
from quire_backend.response_queue import ResponseStream

if TYPE_CHECKING:
    from quire_engine.async_llm import AsyncLLM
    from quire_engine.snapshot import Snapshot

EXPECTED_ERRORS = (RequestError, OperationError, EngineDeadError, EngineUnavailableError)
"""Errors whose messages are for the operator; any other is a bug."""


class Operations:
    """Answers operators. Use it in the event loop's thread.

    Args:
        engine: the engine.
        config: the parsers of tool calls and reasoning are shown.
        ended_requests: the log of ended requests.
        is_ready: whether requests are served.
        live_streams: all requests that are not answered yet.
        scale: changes the number of replicas.
        model: the model's name.
        version: its version.
        num_instances: of the model. An operation has to reach all of them, so there must be one.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        config: FrontendConfig,
        ended_requests: EndedRequestLog,
        *,
        is_ready: Callable[[], bool],
        live_streams: Callable[[], list[ResponseStream]],
        scale: Callable[[int], Awaitable[None]],
        model: str,
        version: str,
        num_instances: int,
    ) -> None:
        self._engine = engine
        self._parsers = config.tool_call_parser, config.reasoning_parser
        self._ended_requests = ended_requests
        self._is_ready, self._live_streams = is_ready, live_streams
        self._scale_engine = scale
        self._scaling: asyncio.Future[None] | None = None
        self._model, self._version = model, version
        self._num_instances = num_instances
        self._changing_adapters = asyncio.Lock()

    async def answer(self, asked: IntrospectionRequest) -> Any:
        """Answer one request. An operation goes on to its end even if its client has left.

        Returns:
            What msgspec can encode.

        Raises:
            RequestError: an argument is wrong.
            OperationError: it cannot be done, or not now; all is as before.
            EngineDeadError: the engine died, or the model is unloaded meanwhile.
        """
        engine, arguments = self._engine, asked.arguments
        match asked.action:
            case "health":
                return {"healthy": self._is_ready(), "is_sleeping": engine.sleep_level > 0}
            case "chat_format":
                return self._chat_format()
            case "snapshot":
                return await self._snapshot()
            case "ended":
                return self._ended_requests.since(arguments.get("cursor", ""))
            case "cancel":
                return {"cancelled": engine.cancel(arguments["cancel_request_id"])}
            case "loras":
                return await engine.list_loras()
        if self._num_instances > 1:  # the server chooses which of them gets the request
            raise OperationError(
                f"the model has {self._num_instances} instances (instance_group in its config.pbtxt), and this request "
                "has reached one of them; give it one instance, and data_parallel_size replicas of the engine behind it"
            )
        if asked.action == "scale":
            return await self._scale(arguments["replicas"])
        try:
            return await self._operate(asked.action, arguments)
        except EngineError as error:
            if isinstance(error, EXPECTED_ERRORS):
                raise
            raise OperationError(str(error)) from error

    def cancel_scaling(self) -> None:
        """End a change of the number of replicas: the model is being unloaded."""
        if self._scaling is not None:
            self._scaling.cancel()

    def _chat_format(self) -> Mapping[str, Any]:
        engine, inputs = self._engine, self._engine.input_processor
        defaults = engine.default_sampling_params.values
        info, template = engine.pooling_info, inputs.chat_template
        return {
            **chat_format(template, *self._parsers),
            **{name: defaults[name] for name in ("temperature", "top_p") if name in defaults},
            "has_chat_template": template is not None,
            "takes_images": inputs.images is not None,
            "max_model_len": inputs.max_model_len,
            "tasks": [*(["generate"] if info.can_generate else []), *info.tasks],
            **({"loras": engine.adapters.names} if engine.adapters.is_enabled else {}),
        }

    async def _snapshot(self) -> "Snapshot":
        streams = self._live_streams()
        labels = {stream.request_id: stream.label for stream in streams if stream.request_id is not None}
        labels |= {one: stream.label for stream in streams if stream.batch is not None for one in stream.batch.live}
        snapshot = await self._engine.snapshot(labels)
        snapshot.model, snapshot.version = self._model, self._version
        snapshot.adapters = await self._engine.list_loras()
        snapshot.engine.queues.responses = sum(stream.pending is not None for stream in streams)
        return snapshot

    async def _scale(self, num_replicas: int) -> dict[str, int]:
        if self._scaling is not None and not self._scaling.done():
            raise ScalingError("the replicas are being changed; try again when that is done")
        before = self._engine.num_replicas
        self._scaling = asyncio.ensure_future(self._scale_engine(num_replicas))
        await asyncio.wait((self._scaling,))
        if self._scaling.cancelled():
            raise EngineDeadError("the model is being unloaded")
        self._scaling.result()
        answer, num_remote = {"replicas": self._engine.num_replicas, "before": before}, self._engine.num_remote_replicas
        return answer if num_remote is None else {**answer, "of_other_hosts": num_remote}

    async def _operate(self, action: str, arguments: Mapping[str, Any]) -> Any:
        engine = self._engine
        match action:
            case "load_lora" | "unload_lora" | "pin_lora":
                async with self._changing_adapters:
                    return await self._change_adapter(action, **arguments)
            case "sleep":
                await engine.sleep(**arguments)
            case "wake_up":
                await engine.wake_up()
            case "update_weights":
                await engine.update_weights(arguments.get("weights_path", ""))
                return dict(arguments)
            case "reset_prefix_cache":
                return {"reset": await engine.reset_prefix_cache()}
        return {"is_sleeping": engine.sleep_level > 0}

    async def _change_adapter(
        self, action: str, lora_name: str, lora_path: str = "", load_inplace: bool = False
    ) -> Any:
        """Returns the adapter, unless it is unloaded."""
        engine = self._engine
        if action == "unload_lora":
            await engine.remove_lora(lora_name)
            return {}
        if action == "pin_lora":
            await engine.pin_lora(lora_name)
        else:
            await self._load_adapter(lora_name, lora_path, load_inplace)
        return next((info for info in await engine.list_loras() if info.name == lora_name), {})

    async def _load_adapter(self, name: str, path: str, in_place: bool) -> None:
        if name == self._model:
            raise RequestError("lora_name", f"lora_name is {quote(name)}, the model's own name; choose another")
        if name in self._engine.adapters.names and not in_place:  # vLLM's words
            raise RequestError(
                "lora_name",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
            )
        if not Path(path).is_absolute():
            raise RequestError("lora_path", f"lora_path is {quote(path)}; it must be an absolute path")
        try:
            await self._engine.add_lora(LoRARequest(name, lora_path=path))
        except CheckpointError as error:
            raise RequestError("lora_path", str(error)) from None
