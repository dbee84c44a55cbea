"""Experts that move between the ranks: every token as it would be without, and an even load."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.core import experts
from quire_engine.core.experts import ExpertBalancer, imbalance
from quire_engine.models.layers import balanced_experts
from quire_engine.models.layers.balanced_experts import BalancedExperts
from quire_engine.models.layers.expert_placement import first_placement
from support.engines import Stream, assert_same, engine, params, run, until
from support.ranks import llm_of_thread_ranks

EPLB: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64, "tensor_parallel_size": 2,
    "enable_expert_parallel": True, "enable_eplb": True,
}  # fmt: skip
PROMPTS = [[5 + i, 6, 7 * i + 2, 8][: 2 + i % 3] for i in range(12)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)

Said = list[tuple[list[int], float | None]]


@contextmanager
def make_llm(folder: Path, **settings: Any) -> Iterator[tuple[LLM, ExpertBalancer]]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "MOVED_BYTES", 1)  # two experts at a time
            llm = stack.enter_context(llm_of_thread_ranks(folder, **{**EPLB, **settings}))
        balancer = llm._core._balancer
        assert balancer is not None
        yield llm, balancer


def say(llm: LLM) -> Said:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


def eplb(**config: int) -> dict[str, Any]:
    return {"eplb_config": {"window_size": 3, "step_interval": 4, **config}}


def mixtures(llm: LLM) -> list[dict[int, BalancedExperts]]:
    """By rank."""
    executor: Any = llm._core.executor
    return [worker.runner.model.mixtures for worker in executor.workers]


@pytest.mark.parametrize(("name", "settings"), [
    ("qwen3-moe", {"num_redundant_experts": 3}),
    pytest.param("qwen2-moe", {"num_redundant_experts": 1}, marks=pytest.mark.slow),
    pytest.param("qwen2-moe", {"num_redundant_experts": 3, "quantization": "int8"}, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", {"num_redundant_experts": 0, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_moving_experts_change_no_bit(name: str, settings: dict[str, Any], checkpoint: Callable[[str], Path]) -> None:
    settings = dict(settings)
    config = eplb(num_redundant_experts=settings.pop("num_redundant_experts"))
    never = {"eplb_config": {**config["eplb_config"], "step_interval": 10**6}}
    with make_llm(checkpoint(name), **settings, **never) as (llm, balancer):
        expected = say(llm)
        first = balancer.placements
    with make_llm(checkpoint(name), **settings, **config) as (llm, balancer):
        executor: Any = llm._core.executor
        calls: list[Any] = []
        rpc = executor.collective_rpc
        executor.collective_rpc = lambda call: (calls.append(call), rpc(call))[1]
        assert say(llm) == expected, "while they move"
        assert calls, "they did"
        assert balancer.placements != first
        for rank in mixtures(llm):
            assert all(mixture.placement == balancer.placements[number] for number, mixture in rank.items())
        llm._core.reset_prefix_cache()
        assert say(llm) == expected, "after they have moved"


def test_tokens_are_those_of_one_rank(checkpoint: Callable[[str], Path]) -> None:
    alone = LLM(checkpoint("qwen3-moe"), dtype="float32", max_model_len=128)
    expected = [token_ids for token_ids, _ in say(alone)]
    alone._core.shutdown()
    with make_llm(checkpoint("qwen3-moe"), **eplb(num_redundant_experts=3)) as (llm, balancer):
        assert [token_ids for token_ids, _ in say(llm)] == expected
        assert any(placement != first_placement(9, 3) for placement in balancer.placements)


def test_a_skewed_load_is_spread_evenly(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are the same, and go to four experts of nine; at first most of these are on one rank."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    ratios: list[float] = []
    routed_experts = balanced_experts.routed_experts

    def spy(x: Any, weights: Any, physical: Any, *others: Any) -> Any:
        computed = Counter((physical.flatten() // 5).tolist())
        ratios.append(2 * max(computed.values()) / computed.total())
        return routed_experts(x, weights, physical, *others)

    monkeypatch.setattr(balanced_experts, "routed_experts", spy)
    with make_llm(checkpoint("qwen3-moe"), **eplb(num_redundant_experts=1, step_interval=3)) as (llm, balancer):
        busiest = []
        for _ in range(24):
            llm._core.reset_prefix_cache()
            ratios.clear()
            llm.generate([[30]] * 8, params, use_tqdm=False)
            busiest.append(max(ratios))
        executor: Any = llm._core.executor
        load = executor.expert_tokens().astype(np.float64)
        shares = np.einsum("lx,lxr->lr", load, balancer.shares)
    assert busiest[0] > 1.7
    assert busiest[-1] == 1.0, "half of the tokens are each rank's"
    assert imbalance(shares, 2).tolist() == pytest.approx([1.0] * 3), "the metric says so, too"


def test_moves_that_fail_leave_every_expert_where_it_is(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(checkpoint("qwen3-moe"), **eplb(num_redundant_experts=3, step_interval=10**6)) as (llm, _):
        expected = say(llm)
    fetch = BalancedExperts.fetch
    failed: set[int] = set()

    def fail_once(self: BalancedExperts, physical: int, source: int) -> Any:
        if self._rank not in failed:
            failed.add(self._rank)
            raise RuntimeError("no memory")
        return fetch(self, physical, source)

    with make_llm(checkpoint("qwen3-moe"), **eplb(num_redundant_experts=3)) as (llm, balancer):
        monkeypatch.setattr(BalancedExperts, "fetch", fail_once)
        assert say(llm) == expected
        assert failed == {0, 1}
        for rank in mixtures(llm):
            assert all(mixture.placement == balancer.placements[number] for number, mixture in rank.items())


def test_an_engine_that_wakes_up_or_starts_again_begins_with_the_first_placement(
    checkpoint: Callable[[str], Path],
) -> None:
    with make_llm(checkpoint("qwen3-moe"), **eplb(num_redundant_experts=3)) as (llm, balancer):
        expected = say(llm)
        assert balancer.is_moving or any(p != first_placement(9, 3) for p in balancer.placements)
        llm._core.sleep(2)
        llm._core.wake_up()
        assert all(placement == first_placement(9, 3) for placement in balancer.placements)
        assert all(mixture.placement == first_placement(9, 3) for rank in mixtures(llm) for mixture in rank.values())
        assert say(llm) == expected


def test_what_cannot_be_balanced_is_refused(checkpoint: Callable[[str], Path]) -> None:
    for settings, message in (
        ({"enable_expert_parallel": False}, "enable_eplb is True; it must be false without enable_expert_parallel"),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size=1"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"eplb_config": {"num_redundant_experts": 2}}, "num_redundant_experts is 2; .*1 or 3 or 5"),
        ({"eplb_config": {"num_redundant_expert": 1}}, "of window_size, step_interval, num_redundant_experts"),
        ({"eplb_config": {"step_interval": 0}}, "eplb_config: step_interval is 0"),
        ({"eplb_config": {"policy": "swift"}}, "eplb_config: policy is 'swift'; it must be 'default'"),
    ):
        with pytest.raises(ValueError, match=message), make_llm(checkpoint("qwen3-moe"), **settings):
            pass


@pytest.mark.slow
def test_killed_while_experts_move(checkpoint: Callable[[str], Path]) -> None:
    """In processes of their own, through shared memory; the next engine has other placements when a request goes on."""
    folder, sampling_params = checkpoint("qwen3-moe"), params(max_tokens=40, logprobs=0)
    settings = {**EPLB, **eplb(num_redundant_experts=3), "kv_cache_memory_bytes": 1 << 22}

    async def all_said() -> Any:
        outputs = await asyncio.gather(*(Stream(llm, prompt, sampling_params).task for prompt in PROMPTS[:4]))
        return [output.outputs for output in outputs]

    async def main() -> None:
        expected = await all_said()
        streams = [Stream(llm, prompt, sampling_params) for prompt in PROMPTS[:4]]
        await until(lambda: sum(stream.num_tokens for stream in streams) > 60)
        os.kill(llm.worker_pids[1], signal.SIGKILL)
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        for output, want in zip(outputs, expected, strict=True):
            assert_same(output.outputs, want)

    with engine(folder, **settings) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1
        assert recorder.num_replayed == 4
