"""What one request, and one key, may ask for."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from quire_gateway.errors import ApiError, InvalidRequestError
from quire_gateway.keys import ApiKey

if TYPE_CHECKING:  # `quire --help` shows the limits, and imports no more than it has to
    from quire_gateway.requests import GenerationRequest

_MINUTE = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What one request may hold, at most. The model has bounds of its own beyond these. The texts are of `--help`.

    Raises:
        ValueError: one is below 1.
    """

    max_body_bytes: Annotated[int, "Largest body of a request."] = 16 << 20
    max_total_body_bytes: int = 256 << 20
    """Of the bodies of all requests that are being served."""
    max_header_bytes: int = 32 << 10
    """Of all its headers."""
    max_n: Annotated[int, "Largest n."] = 128
    max_logprobs: Annotated[int, "Most log-probabilities: per token, times max_tokens, n, prompts."] = 1 << 20
    """For a chat without `max_tokens`, the limit of an answer's bytes bounds them."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}; it must be at least 1")

    def check(self, request: "GenerationRequest") -> None:
        """Reject what is too much.

        Raises:
            InvalidRequestError: it is; the message names the field.
        """
        said = request.sampling
        n = said.get("n", 1)
        self._at_most(request, "n", n, self.max_n, "n is {}")
        if "logprobs" in said:
            from quire_engine.sampling_params import SamplingParams

            is_chat = isinstance(request.prompts[0], Mapping)
            max_tokens = said.get("max_tokens", 0 if is_chat else SamplingParams().max_tokens)
            number = max_tokens * (said["logprobs"] + 1) * n * len(request.prompts)
            self._at_most(request, "logprobs", number, self.max_logprobs, "logprobs asks for {} of them in all")

    @staticmethod
    def _at_most(request: "GenerationRequest", name: str, value: int, limit: int, what: str) -> None:
        if value > limit:
            param = request.renamed.get(name, name)
            message = what.format(value).replace(name, param, 1)
            raise InvalidRequestError(param, f"{message}; at most {limit} are taken here")


class Budget:
    """What one key has left. Requests and tokens come back evenly, a minute's worth at most.

    A request counts when it is let in, and its tokens when they are there: so a key that has used more than was
    left waits until that is made up.

    Args:
        key: whose it is.
        clock: in seconds.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._requests = _Bucket(key.requests_per_minute, clock())
        self._tokens = _Bucket(key.tokens_per_minute, clock())
        self.num_requests = 0
        self.num_tokens = 0
        self.num_in_flight = 0
        self.num_refused = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_concurrent"), 0)

    def enter(self) -> None:
        """Let a request in; `leave` follows.

        Raises:
            ApiError: 429, with `retry-after`.
        """
        now, key = self._clock(), self.key
        if key.max_concurrent is not None and self.num_in_flight >= key.max_concurrent:
            raise self._refusal("max_concurrent", key.max_concurrent, 1.0)
        if (wait := self._tokens.seconds_until(0.0, now)) > 0:
            raise self._refusal("tokens_per_minute", key.tokens_per_minute, wait)
        if (wait := self._requests.seconds_until(1.0, now)) > 0:
            raise self._refusal("requests_per_minute", key.requests_per_minute, wait)
        self._requests.take(1, now)
        self.num_requests += 1
        self.num_in_flight += 1

    def leave(self) -> None:
        """A request has ended."""
        self.num_in_flight -= 1

    def charge(self, num_tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        self._tokens.take(num_tokens, self._clock())
        self.num_tokens += num_tokens

    def _refusal(self, limit: str, value: int | None, wait_s: float) -> ApiError:
        self.num_refused[limit] += 1
        error = ApiError(429, f"the limit of this API key is reached: {limit} is {value}", code="rate_limit_exceeded")
        error.headers = {"retry-after": str(max(1, math.ceil(wait_s - 1e-6)))}
        return error


class _Bucket:
    """A token bucket: what there is of something that comes back evenly. Without a limit, it is never empty."""

    def __init__(self, per_minute: int | None, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute or 0)
        self._at = now

    def take(self, number: float, now: float) -> None:
        """Take some, be there as many or not."""
        if self._per_minute is not None:
            self._refill(self._per_minute, now)
            self._level -= number

    def seconds_until(self, number: float, now: float) -> float:
        """How long it takes until there are more than none, and so many; 0: there are."""
        if self._per_minute is None:
            return 0.0
        self._refill(self._per_minute, now)
        wanted = max(number, 1e-9)
        return max(0.0, (wanted - self._level) * _MINUTE / self._per_minute)

    def _refill(self, per_minute: int, now: float) -> None:
        self._level = min(float(per_minute), self._level + (now - self._at) * per_minute / _MINUTE)
        self._at = now
