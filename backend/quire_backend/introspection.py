"""Introspection: what the model can be asked through the server, by an operator with a token.

A request with the parameter `introspect` does not generate: its inputs are not read, and it gets one response, with
JSON in `text_output`. The first two need no token::

    introspect = "health"                                   → {"healthy": true | false, "is_sleeping": true | false}:
                                                              whether the engine runs, and whether it sleeps
    introspect = "chat_format"                              → {"tool_call_parser": …, "reasoning_parser": …,
                                                               "has_chat_template": …, "max_model_len": …,
                                                               "tasks": …, "loras": names of adapters}
    introspect = "snapshot"                                 → the engine at this moment, see `quire_engine.snapshot`
    introspect = "ended", cursor = "<of the last answer>"   → requests that have ended since, see `EndedRequests` there
    introspect = "cancel", cancel_request_id = "<its id>"   → {"cancelled": true | false}
    introspect = "scale", replicas = 3                      → {"replicas": 3, "before": 2}, once it is so
    introspect = "sleep", level = 1, mode = "wait"          → {"is_sleeping": true}, once it is so
    introspect = "wake_up"                                  → {"is_sleeping": false}
    introspect = "update_weights", weights_path = "/…"      → {"weights_path": "/…"}, once they are used
    introspect = "reset_prefix_cache"                       → {"reset": true}
    introspect = "loras"                                    → the LoRA adapters, see `quire_engine.lora.AdapterInfo`
    introspect = "load_lora", lora_name = "alice",          → this adapter, once requests may name it
        lora_path = "/adapters/alice", load_inplace = false
    introspect = "unload_lora", lora_name = "alice"         → {}
    introspect = "pin_lora", lora_name = "alice"            → this adapter, which then stays in memory
    introspection_token = "…"                               with all but the first two
"""

import hmac
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_engine.config import MAX_REPLICAS
from quire_engine.errors import MAX_QUOTED, RequestError, quote
from quire_engine.sampling_params import is_text

logger = logging.getLogger(__name__)

_WARN_S = 60.0

_OPEN_ACTIONS = _HEALTH, _CHAT_FORMAT = ("health", "chat_format")
_LORA_NAME, _LORA_PATH, _IN_PLACE = "lora_name", "lora_path", "load_inplace"
_OPERATIONS = {
    "sleep": ("level", "mode"), "wake_up": (), "update_weights": ("weights_path",), "reset_prefix_cache": (),
    "loras": (), "load_lora": (_LORA_NAME, _LORA_PATH, _IN_PLACE), "unload_lora": (_LORA_NAME,),
    "pin_lora": (_LORA_NAME,),
}  # fmt: skip
"""What the engine does for operators, with its parameters."""
_ACTIONS = (*_OPEN_ACTIONS, "snapshot", "ended", "cancel", "scale", *_OPERATIONS)
_PARAMETERS = ("introspect", "introspection_token", "cancel_request_id")
_CURSOR = "cursor"
_REPLICAS = "replicas"
_OWN_PARAMETERS: dict[Any, tuple[str, ...]] = {"ended": (_CURSOR,), "scale": (_REPLICAS,), **_OPERATIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class IntrospectionRequest:
    """A request of an operator, whose token was right, or for what needs no token."""

    cancel_request_id: str | None = None
    """The request to cancel."""
    ended_since: str | None = None
    """A cursor: the requests that have ended since; empty: all that are kept."""
    num_replicas: int | None = None
    """How many replicas there are to be."""
    operation: str | None = None
    """One of `_OPERATIONS`. With none of these: take a snapshot."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the operation; only names and folders of adapters are checked yet."""
    health_only: bool = False
    """Whether the engine runs, and nothing else. /metrics says as much, without a token."""
    chat_format_only: bool = False
    """How the model writes calls and reasoning, how long its context is, and nothing else."""


def parse_introspection(parameters: str, guard: "TokenGuard") -> IntrospectionRequest | None:
    """Read the request parameters of any request; None if they do not ask for introspection.

    Args:
        parameters: a JSON object, or nothing.
        guard: checks the token.

    Raises:
        RequestError: the token is missing or wrong, or it asks for something unknown.
    """
    if '"introspect' not in parameters and '"cancel_request_id"' not in parameters:  # cheaper than to parse them all
        return None
    values: dict[str, Any] = json.loads(parameters)
    if not any(name in values for name in _PARAMETERS):
        return None
    action = values.get("introspect")
    if action in _OPEN_ACTIONS and not any(name in values for name in _PARAMETERS if name != "introspect"):
        return IntrospectionRequest(health_only=action == _HEALTH, chat_format_only=action == _CHAT_FORMAT)
    guard.check(values.get("introspection_token"))
    if action not in _ACTIONS:
        raise RequestError("introspect", f"introspect is {quote(action)}; it must be one of {', '.join(_ACTIONS)}")
    known = {*_PARAMETERS, "id", *_OWN_PARAMETERS.get(action, ())}
    for name in values:
        if name not in known and not name.startswith("triton_"):  # an HTTP body's id comes along
            raise RequestError(name, f"{name[:MAX_QUOTED]} has no meaning in a request with introspect")
    request_id = values.get("cancel_request_id")
    if action == "snapshot" and request_id is None:
        return IntrospectionRequest()
    if action == "ended" and request_id is None:
        cursor = values.get(_CURSOR, "")
        if not isinstance(cursor, str):
            raise RequestError(_CURSOR, f"cursor is {quote(cursor)}; it must be that of an earlier answer")
        return IntrospectionRequest(ended_since=cursor)
    if action == "scale" and request_id is None:
        num_replicas = values.get(_REPLICAS)
        if type(num_replicas) is not int or not 1 <= num_replicas <= MAX_REPLICAS:
            raise RequestError(
                _REPLICAS, f"replicas is {quote(num_replicas)}; it must be an integer from 1 to {MAX_REPLICAS}"
            )
        return IntrospectionRequest(num_replicas=num_replicas)
    if action in _OPERATIONS and request_id is None:
        arguments = {name: values[name] for name in _OPERATIONS[action] if name in values}
        if "lora" in action:
            _check_adapter(action, arguments)
        return IntrospectionRequest(operation=action, arguments=arguments)
    if action == "cancel" and isinstance(request_id, str) and request_id:
        return IntrospectionRequest(cancel_request_id=request_id)
    raise RequestError(
        "cancel_request_id", "cancel_request_id must be the id of a request, with introspect=cancel only"
    )


def _check_adapter(action: str, said: Mapping[str, Any]) -> None:
    for name, what in ((_LORA_NAME, "the name of an adapter"), (_LORA_PATH, "the folder of an adapter, on the server")):
        value = said.get(name, "")
        if name in _OPERATIONS[action] and not (isinstance(value, str) and value and is_text(value)):
            raise RequestError(name, f"{name} is {quote(value)}; it must be {what}")
    in_place = said.get(_IN_PLACE, False)
    if not isinstance(in_place, bool):
        raise RequestError(_IN_PLACE, f"{_IN_PLACE} is {quote(in_place)}; it must be true or false")


class TokenGuard:
    """Checks the token.

    Nothing else is known of the caller, so the number of attempts is not limited: an attacker who used them up would
    lock out the operators. A token is too long to be guessed anyway; wrong ones are logged.

    Args:
        token: the right one; None: all requests are rejected.
        clock: in seconds.
    """

    def __init__(self, token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._clock = clock
        self._num_wrong = 0
        self._next_warning = 0.0

    def check(self, shown: object) -> None:
        """Compare in constant time.

        Raises:
            RequestError: it is wrong; the message does not repeat it.
        """
        name = "introspection_token"
        if self._token is None:
            raise RequestError(
                "introspect",
                f"introspect is refused: this model has no {name}; set {name} in its model.json, or the environment "
                "variable QUIRE_INTROSPECTION_TOKEN of the server",
            )
        if shown is None:
            raise RequestError(name, f"unauthorized: {name} is missing")
        if not isinstance(shown, str) or not hmac.compare_digest(shown.encode(errors="replace"), self._token.encode()):
            self._warn()
            raise RequestError(name, f"unauthorized: {name} is wrong")

    def _warn(self) -> None:
        self._num_wrong += 1
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + _WARN_S
            logger.warning("introspection was asked for with a wrong introspection_token: %d times", self._num_wrong)
            self._num_wrong = 0
