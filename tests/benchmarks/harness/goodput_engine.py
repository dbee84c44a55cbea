"""The same load through real engines, one for each policy, in turn; times are from when a request was to be sent."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, Protocol

from quire_engine import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams
from quire_engine.errors import EngineUnavailableError
from quire_engine.slo import RequestSLO, SLOTargets

__all__ = ["Engines", "Sent"]

_VOCABULARY = 256


class Sent(Protocol):
    """One request, and what became of it; times are in seconds of the run."""

    at: float
    slo_class: str
    num_prompt_tokens: int
    num_output_tokens: int
    targets: SLOTargets
    first_token_at: float | None
    ended_at: float | None
    num_tokens: int
    predicted_ttft: float | None
    refusal: str | None


class Engines:
    """An engine for each policy; one that is idle takes no time.

    Args:
        model: a checkpoint's folder.
        policies: values of `scheduling_policy`.
        classes: of the setting `slo`; requests bring targets of their own.
        settings: others.
    """

    def __init__(self, model: Path, policies: Sequence[str], classes: Mapping[str, Any], **settings: Any) -> None:
        self._engines = {
            policy: AsyncLLM(
                EngineConfig.from_settings(
                    {"model": str(model), "scheduling_policy": policy, "slo": classes, "enable_prefix_caching": False}
                    | settings
                )
            )
            for policy in policies
        }

    async def serve(self, policy: str, load: Sequence[Sent]) -> float:
        """Send each request at its time; returns the seconds until the last one ended."""
        began_at = time.monotonic()
        await asyncio.gather(*(self._send(self._engines[policy], one, began_at, seed) for seed, one in enumerate(load)))
        return time.monotonic() - began_at

    async def _send(self, llm: AsyncLLM, one: Sent, began_at: float, seed: int) -> None:
        await asyncio.sleep(max(began_at + one.at - time.monotonic(), 0.0))
        random, targets = Random(seed), one.targets
        prompt = [random.randrange(_VOCABULARY) for _ in range(one.num_prompt_tokens)]
        params = SamplingParams(
            max_tokens=one.num_output_tokens, ignore_eos=True, seed=seed, output_kind=RequestOutputKind.DELTA
        )
        slo = RequestSLO(
            slo_class=one.slo_class, ttft_ms=targets.ttft_ms, tpot_ms=targets.tpot_ms, e2e_ms=targets.e2e_ms
        )
        try:
            async with aclosing(llm.generate(prompt, params, slo=slo)) as outputs:
                async for output in outputs:
                    now = time.monotonic() - began_at
                    one.first_token_at = one.first_token_at or now
                    one.num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    if output.finished:
                        one.ended_at = now
                        one.predicted_ttft = output.metrics.predicted_ttft_seconds if output.metrics else None
        except EngineUnavailableError:
            one.refusal = "ttft"

    async def saturate(self, load: Sequence[Sent]) -> tuple[float, float]:
        """Requests per second when all come at once to each engine; the slowest counts. And the median time per token
        meanwhile."""
        rates, per_token = [], []
        for policy in self._engines:
            for one in load:
                one.at, one.num_tokens, one.first_token_at = 0.0, 0, None
            rates.append(len(load) / await self.serve(policy, load))
            per_token += [
                (one.ended_at - one.first_token_at) / (one.num_tokens - 1)
                for one in load
                if one.ended_at is not None and one.first_token_at is not None and one.num_tokens > 1
            ]
        return min(rates), statistics.median(per_token)

    def shutdown(self) -> None:
        """End them."""
        for llm in self._engines.values():
            llm.shutdown()
