"""Introspection: what the model can be asked through the server, by an operator with a token.

A request with the parameter `introspect` does not generate: its inputs are not read, and it gets one response, with
JSON in `text_output`. The first two need no token::

    introspect = "health"                                   → {"healthy": true | false, "is_sleeping": true | false}:
                                                              whether the engine runs, and whether it sleeps
    introspect = "chat_format"                              → {"tool_call_parser": …, "reasoning_parser": …,
                                                               "has_chat_template": …, "takes_images": …,
                                                               "max_model_len": …, "tasks": …,
                                                               "loras": names of adapters}
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

_OPEN_ACTIONS = ("health", "chat_format")
"""Actions that need no token."""
_CANCEL_ID, _CURSOR, _REPLICAS = "cancel_request_id", "cursor", "replicas"
_LORA_NAME, _LORA_PATH, _IN_PLACE = "lora_name", "lora_path", "load_inplace"
_ACTIONS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_OPEN_ACTIONS, ()), "snapshot": (), "ended": (_CURSOR,), "cancel": (_CANCEL_ID,),
    "scale": (_REPLICAS,), "sleep": ("level", "mode"), "wake_up": (), "update_weights": ("weights_path",),
    "reset_prefix_cache": (), "loras": (), "load_lora": (_LORA_NAME, _LORA_PATH, _IN_PLACE),
    "unload_lora": (_LORA_NAME,), "pin_lora": (_LORA_NAME,),
}  # fmt: skip
"""Values of `introspect` → their parameters."""
_PARAMETERS = ("introspect", "introspection_token", _CANCEL_ID)


@dataclass(frozen=True, kw_only=True, slots=True)
class IntrospectionRequest:
    """A request of an operator. Its token was right, or its action needs none."""

    action: str
    """A value of `introspect`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The action's parameters, as far as they are given. The engine checks those of its own operations."""


def parse_introspection(parameters: str, guard: "TokenGuard") -> IntrospectionRequest | None:
    """Read the request parameters of any request; None if it is no request for introspection.

    Args:
        parameters: a JSON object, or nothing.
        guard: checks the token.

    Raises:
        RequestError: the token is missing or wrong, or the action or a parameter is unknown.
    """
    if '"introspect' not in parameters and '"cancel_request_id"' not in parameters:  # cheaper than to parse them all
        return None
    values: dict[str, Any] = json.loads(parameters)
    if not any(name in values for name in _PARAMETERS):
        return None
    action = values.get("introspect")
    if action in _OPEN_ACTIONS and not any(name in values for name in _PARAMETERS if name != "introspect"):
        return IntrospectionRequest(action=action)
    guard.check(values.get("introspection_token"))
    if not isinstance(action, str) or action not in _ACTIONS:
        raise RequestError("introspect", f"introspect is {quote(action)}; it must be one of {', '.join(_ACTIONS)}")
    known = {*_PARAMETERS, "id", *_ACTIONS[action]}
    for name in values:
        if name not in known and not name.startswith("triton_"):  # an HTTP body's id comes along
            raise RequestError(name, f"{name[:MAX_QUOTED]} has no meaning in a request with introspect")
    request_id = values.get(_CANCEL_ID)
    if not (isinstance(request_id, str) and request_id) if action == "cancel" else request_id is not None:
        raise RequestError(_CANCEL_ID, f"{_CANCEL_ID} must be the id of a request, with introspect=cancel only")
    arguments = {name: values[name] for name in _ACTIONS[action] if name in values}
    if action == "ended" and not isinstance(cursor := arguments.get(_CURSOR, ""), str):
        raise RequestError(_CURSOR, f"cursor is {quote(cursor)}; it must be that of an earlier answer")
    if action == "scale":
        num_replicas = arguments.get(_REPLICAS)
        if type(num_replicas) is not int or not 1 <= num_replicas <= MAX_REPLICAS:
            raise RequestError(
                _REPLICAS, f"replicas is {quote(num_replicas)}; it must be an integer from 1 to {MAX_REPLICAS}"
            )
    if "lora" in action:
        _check_adapter(action, arguments)
    return IntrospectionRequest(action=action, arguments=arguments)


def _check_adapter(action: str, said: Mapping[str, Any]) -> None:
    for name, what in ((_LORA_NAME, "the name of an adapter"), (_LORA_PATH, "the folder of an adapter, on the server")):
        value = said.get(name, "")
        if name in _ACTIONS[action] and not (isinstance(value, str) and value and is_text(value)):
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
