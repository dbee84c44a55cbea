"""Sleep gives memory back to the system, and wake_up has everything again as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import EngineDeadError, EngineError, EngineSleepingError
from quire_engine.system.memory import resident_memory_bytes
from quire_engine.worker import offload, worker

KV_CACHE_BYTES = 96 * 2**20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5 + i % 60 for i in range(40)]


def make_llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", max_model_len=512, kv_cache_memory_bytes=KV_CACHE_BYTES)


def touch_kv_cache(llm: LLM) -> int:
    """Write to every page of the cache, as a long life would; returns its size in bytes."""
    size = 0
    for caches in llm._core.executor._worker.runner.kv_caches:  # type: ignore[attr-defined]
        for cache in caches:
            cache.fill_(0.5)
            size += cache.nbytes
    return size


def weight_bytes(llm: LLM) -> int:
    model = llm._core.executor._worker.runner.model  # type: ignore[attr-defined]
    return sum(parameter.nbytes for parameter in model.parameters())


def tokens(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def held_bytes() -> int:
    """Of the memory that the engine computes in."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else resident_memory_bytes()


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_returned_and_everything_works_again(level: int, checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tinypy"))
    expected = tokens(llm)
    size = touch_kv_cache(llm) + (weight_bytes(llm) if level == 2 or torch.cuda.is_available() else 0)
    awake = held_bytes()
    llm.sleep(level)
    assert llm.is_sleeping()
    returned = awake - held_bytes()
    assert returned >= 0.9 * size, f"{returned / 2**20:.1f} MiB of {size / 2**20:.1f} came back"
    llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.get_stats().num_blocks_cached == 0, "cached blocks would hold nothing"
    assert tokens(llm) == expected
    assert tokens(llm) == expected, "from the prefix cache"


def test_deeper_sleep_and_waking_twice(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    expected = tokens(llm)
    for level in (1, 1, 2, 1):
        llm.sleep(level)
    llm.wake_up()
    llm.wake_up()
    assert tokens(llm) == expected


def test_sleeping_engine_takes_no_requests_and_forgets_none(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    llm.sleep()
    with pytest.raises(EngineSleepingError, match="wake it up"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False)
    llm.wake_up()
    assert len(tokens(llm)) == 12
    assert not llm._outputs.has_requests()


def test_live_requests_keep_the_engine_awake(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    stream = llm.stream(PROMPT, GREEDY)
    first = next(stream)
    with pytest.raises(EngineError, match="1 requests are live"):
        llm.sleep()
    assert len(first.outputs[0].token_ids) + sum(len(delta.outputs[0].token_ids) for delta in stream) == 12
    llm.sleep()
    llm.wake_up()


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights that go to a GPU need none of the host's memory")
def test_without_memory_for_the_weights_it_sleeps_on(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    expected = tokens(llm)
    llm.sleep(2)
    monkeypatch.setattr(worker, "available_memory_bytes", lambda: 0)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"wake_up: the weights take .* and 0 MiB of memory are free; .* still"):
            llm.wake_up()
        assert llm.is_sleeping()
    monkeypatch.undo()
    llm.wake_up()
    assert tokens(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_without_memory_for_the_cache_it_sleeps_on(
    level: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    expected = tokens(llm)
    llm.sleep(level)

    def fails(num_blocks: int) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(llm._core.executor._worker._caches, "initialize", fails)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="wake_up: no memory; the engine still sleeps"):
        llm.wake_up()
    monkeypatch.undo()
    assert llm.is_sleeping()
    with pytest.raises(EngineSleepingError):
        tokens(llm)
    llm.wake_up()
    assert tokens(llm) == expected


def test_without_room_for_the_weights_of_a_gpu_it_stays_awake(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU stands in for the GPU."""
    llm = make_llm(checkpoint("tied-gqa"))
    expected = tokens(llm)
    monkeypatch.setattr(llm._core.executor._worker, "_gpu_memory", object())  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(offload, "available_memory_bytes", lambda: 0)
    with pytest.raises(EngineError, match=r"^sleep: level is 1.* 0 MiB are free; set level to 2"):
        llm.sleep(1)
    assert not llm.is_sleeping()
    assert tokens(llm) == expected
    monkeypatch.setattr(offload, "available_memory_bytes", lambda: 1 << 40)
    model = llm._core.executor._worker.runner.model  # type: ignore[attr-defined]
    for level in (1, 2):
        before = len(offload.weight_storages(model))
        llm.sleep(1)
        assert len(offload.weight_storages(model)) < before, "those that are in no mapped file are in host memory"
        llm.sleep(level)
        monkeypatch.setattr(llm._core.executor._worker, "_gpu_memory", None)  # type: ignore[attr-defined]
        llm.wake_up()
        monkeypatch.setattr(llm._core.executor._worker, "_gpu_memory", object())  # type: ignore[attr-defined]
        assert tokens(llm) == expected


def test_an_engine_that_can_neither_sleep_nor_wake_up_ends(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks may have no KV cache: no request may be computed."""
    llm = make_llm(checkpoint("tied-gqa"))

    def fails(call: object) -> list[int]:
        raise MemoryError(f"no memory for {type(call).__name__}")

    monkeypatch.setattr(llm._core.executor, "collective_rpc", fails)
    with pytest.raises(EngineDeadError, match=r"sleep: no memory for Sleep, and .*: no memory for WakeUp"):
        llm.sleep()


def test_bad_level_is_named(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    with pytest.raises(EngineError, match="level is 3; it must be 1"):
        llm.sleep(3)


def test_reset_prefix_cache_forgets_and_disturbs_nobody(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    expected = tokens(llm)
    stream = llm.stream(PROMPT, GREEDY)
    got = next(stream).outputs[0].token_ids
    assert llm.get_stats().prefix_cache_hits == 32
    assert llm.reset_prefix_cache()
    assert got + [token for delta in stream for token in delta.outputs[0].token_ids] == expected
    assert llm.reset_prefix_cache()
    assert llm.get_stats().num_blocks_cached == 0
    assert tokens(llm) == expected
    assert llm.get_stats().prefix_cache_hits == 32, "the last one found nothing"


def test_salted_prompts_share_only_with_their_own_salt(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tied-gqa"))
    cached = [
        llm.generate([PROMPT], SamplingParams(max_tokens=1, cache_salt=salt), use_tqdm=False)[0].num_cached_tokens
        for salt in (None, "a", "b", "a", None)
    ]
    assert cached == [0, 0, 0, 32, 32]
