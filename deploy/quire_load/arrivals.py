"""When requests come: open loop (Poisson, gamma, fixed rate, ramps), all at once, or closed loop."""

import itertools
import math
import random
from dataclasses import dataclass
from typing import Annotated

RAMP_UP_STRATEGIES = ("linear", "exponential")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """When requests come, under the names of `vllm bench serve`. The texts are those of `--help`.

    In an open loop they come at their times, whatever the server does: who is slow has more of them at once. In a
    closed loop, `max_concurrency` users each send their next request when the last one has ended: who is slow gets
    fewer.
    """

    request_rate: Annotated[float, "Requests per second; inf: all at once."] = math.inf
    burstiness: Annotated[
        float, "Gamma shape of the gaps: 1 is Poisson, less comes in bursts, inf at a fixed rate."
    ] = 1.0
    max_concurrency: Annotated[
        int | None, "Most requests at once; without a rate, this many users in a closed loop."
    ] = None
    """Of an open loop, those above wait here, and their time runs."""
    ramp_up_strategy: Annotated[str, "linear or exponential: a rate that changes."] = ""
    """From `ramp_up_start_rps` to `ramp_up_end_rps` over all requests, in place of `request_rate`."""
    ramp_up_start_rps: Annotated[float | None, "The ramp's first rate."] = None
    ramp_up_end_rps: Annotated[float | None, "The ramp's last rate."] = None
    seed: Annotated[int, "Of prompts, lengths and arrivals."] = 0

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, or inf")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency is {self.max_concurrency}; it must be at least 1")
        if self.ramp_up_strategy:
            self._check_ramp()
        elif self.ramp_up_start_rps is not None or self.ramp_up_end_rps is not None:
            raise ValueError(
                "ramp_up_strategy is not given, but a rate of a ramp is; it must be " + " or ".join(RAMP_UP_STRATEGIES)
            )

    def _check_ramp(self) -> None:
        if self.ramp_up_strategy not in RAMP_UP_STRATEGIES:
            known = " or ".join(RAMP_UP_STRATEGIES)
            raise ValueError(f"ramp_up_strategy is {self.ramp_up_strategy!r}; it must be {known}")
        for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
            rate = getattr(self, name)
            if rate is None or not 0 < rate < math.inf:
                raise ValueError(f"{name} is {rate}; a ramp needs a number of requests per second above 0")
        if math.isfinite(self.request_rate):
            raise ValueError(f"request_rate is {self.request_rate:g} beside a ramp; leave one of them out")

    @property
    def is_closed_loop(self) -> bool:
        """Whether a request comes when another one has ended."""
        return math.isinf(self.request_rate) and not self.ramp_up_strategy and self.max_concurrency is not None

    def offsets(self, num_requests: int) -> list[float]:
        """Seconds from the start to each request of an open loop, the same for the same seed.

        As vLLM does it, the gaps are scaled so that the last request comes when it is due at that rate: runs of few
        requests then have the rate that they say. (Of a Poisson process it makes one with a given number of arrivals.)
        """
        expected = [1 / self._rate(number, num_requests) for number in range(num_requests)]
        if math.isinf(self.burstiness):
            return list(itertools.accumulate(expected))
        rng = random.Random(f"arrivals {self.seed}")
        gaps = [rng.gammavariate(self.burstiness, gap / self.burstiness) if gap else 0.0 for gap in expected]
        scale = sum(expected) / (sum(gaps) or 1.0)
        return [scale * offset for offset in itertools.accumulate(gaps)]

    def _rate(self, number: int, num_requests: int) -> float:
        """At which the n-th request comes."""
        if self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
            return self.request_rate
        progress = number / max(num_requests - 1, 1)
        if self.ramp_up_strategy == "linear":
            return self.ramp_up_start_rps + (self.ramp_up_end_rps - self.ramp_up_start_rps) * progress
        return float(self.ramp_up_start_rps * (self.ramp_up_end_rps / self.ramp_up_start_rps) ** progress)
