"""Adapters where engines serve: names come and go, folders change, engines die, ranks share the layers."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire_engine import BeamSearchParams, LoRARequest, RequestOutputKind, SamplingParams
from quire_engine.errors import CheckpointError, RequestError, UnknownAdapterError
from safetensors.torch import load_file, save_file
from support.adapters import ALL_LINEAR, Adapters, make_adapter, merge_adapter, stack_adapter
from support.engines import engine, kill, run, until
from support.oracle import make_prompts

SETTINGS: dict[str, Any] = {
    "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 256,
}  # fmt: skip
PROMPTS = make_prompts(8, 515, 40, seed=5)
NAMES = ["one", "", "eight", "stabilized", "patterns", "bfloat16", "tables", "changed-tables"]


def greedy(num_tokens: int = 12, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)


async def tokens_of(llm: Any, prompt: list[int], request: LoRARequest | None, params: SamplingParams) -> list[int]:
    async for output in llm.generate(prompt, params, lora_request=request):
        last = output
    token_ids: list[int] = last.outputs[0].token_ids
    return token_ids


def expected_tokens(adapters: Any, num_tokens: int = 12) -> list[list[int]]:
    return [
        adapters.expected(name, [prompt], num_tokens)[0].token_ids for name, prompt in zip(NAMES, PROMPTS, strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"async_scheduling": True},
    ],
    ids=str,
)
def test_ranks_stages_and_replicas_say_the_same(adapters: Any, settings: dict[str, Any]) -> None:
    expected = expected_tokens(adapters)
    device = "cpu" if any(name.endswith("_size") for name in settings) else "auto"  # a GPU machine may have one
    with engine(adapters.base, device=device, **SETTINGS, **settings) as (llm, _):

        async def main() -> list[list[int]]:
            return await asyncio.gather(
                *(
                    tokens_of(llm, prompt, adapters.request(name), greedy())
                    for name, prompt in zip(NAMES, PROMPTS, strict=True)
                )
            )

        assert run(llm, main) == expected
        assert not llm._output_processor.has_requests()


@pytest.mark.parametrize("settings", [{}, {"enable_expert_parallel": True}], ids=str)
def test_ranks_share_adapters_of_experts(checkpoint: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Slices of each expert, or whole experts; also after the ranks have died."""
    base, targets = checkpoint("qwen3-moe"), ["gate_proj", "up_proj", "down_proj", "k_proj"]
    folders = {"0": make_adapter(tmp_path / "0", base, rank=3, targets=targets, size=1.5)}
    folders["1"] = stack_adapter(tmp_path / "1", make_adapter(tmp_path / "one", base, rank=9, targets=targets, seed=1))
    merged = {"0": folders["0"], "1": tmp_path / "one"}
    adapters = Adapters(base, folders, lambda one: merge_adapter(tmp_path / f"merged-{one}", base, merged[one]))
    names, prompts = ["0", "", "1"], PROMPTS[:3]
    expected = [adapters.expected(name, [prompt], 16)[0].token_ids for name, prompt in zip(names, prompts, strict=True)]
    with engine(
        base, device="cpu", dtype="float32", tensor_parallel_size=2, step_seconds=0.02, **SETTINGS, **settings
    ) as (llm, recorder):

        async def interrupted() -> list[int]:
            tokens: list[int] = []
            params = greedy(16, RequestOutputKind.DELTA)
            async for output in llm.generate(prompts[2], params, lora_request=adapters.request("1")):
                if not tokens:
                    kill(llm)
                tokens += output.outputs[0].token_ids
            return tokens

        async def main() -> None:
            found = await asyncio.gather(
                *(
                    tokens_of(llm, prompt, adapters.request(name), greedy(16))
                    for name, prompt in zip(names, prompts, strict=True)
                )
            )
            assert found == expected
            assert await interrupted() == expected[2]
            assert recorder.num_restarts == 1

        run(llm, main)


@pytest.mark.parametrize(
    ("name", "targets", "settings"),
    [
        ("tied-gqa", ALL_LINEAR, {}),
        ("mixtral", ("o_proj", "w1", "w2"), {}),
        ("mixtral", ("v_proj", "w2"), {"enable_expert_parallel": True}),
    ],
)
def test_ranks_share_norms_of_rows(
    checkpoint: Any, tmp_path: Path, name: str, targets: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """DoRA beside LoRA and the base, in two slots for three adapters."""
    base, names = checkpoint(name), ["0", "", "1", "2", "0", "1"]
    folders = {
        str(i): make_adapter(tmp_path / str(i), base, rank=5 + 8 * i, targets=targets, seed=i, use_dora=has_norms)
        for i, has_norms in enumerate((True, False, True))
    }
    adapters = Adapters(base, folders, lambda one: merge_adapter(tmp_path / f"merged-{one}", base, folders[one]))
    expected = {one: adapters.expected(one, PROMPTS[:1], 12)[0].token_ids for one in dict.fromkeys(names)}
    with engine(base, device="cpu", dtype="float32", tensor_parallel_size=2, **SETTINGS, **settings) as (llm, _):

        async def main() -> None:
            for order in (1, -1):
                requests = [adapters.request(one) for one in names[::order]]
                found = await asyncio.gather(*(tokens_of(llm, PROMPTS[0], one, greedy()) for one in requests))
                assert found == [expected[one] for one in names[::order]]

        run(llm, main)


def test_names_come_and_go(adapters: Any, tmp_path: Path) -> None:
    """Registered, listed, pinned, replaced under its name, removed; no request gets blocks of the old weights."""
    folder = tmp_path / "changing"
    shutil.copytree(adapters.folders["one"], folder)
    prompt = make_prompts(1, 515, 60, seed=9)[0] * 2
    name = LoRARequest("changing")
    with engine(adapters.base, lora_modules={"eight": str(adapters.folders["eight"])}, **SETTINGS) as (llm, recorder):

        async def main() -> None:
            with pytest.raises(UnknownAdapterError, match=r"'eihgt'.*did you mean 'eight'"):
                await tokens_of(llm, prompt, LoRARequest("eihgt"), greedy())
            first = await llm.add_lora(LoRARequest("changing", lora_path=str(folder)))
            assert (first.rank, first.target_modules[0], first.state) == (1, "down_proj", "disk")
            assert [info.name for info in await llm.list_loras()] == ["eight", "changing"]
            before = await tokens_of(llm, prompt, name, greedy())
            assert before == adapters.expected("one", [prompt], 12)[0].token_ids
            await until(lambda: llm.adapters.infos(llm._adapter_stats.values())[1].state == "ready")
            for file in adapters.folders["stabilized"].iterdir():
                shutil.copy(file, folder)
            with pytest.raises(RequestError, match=r"'pinned'.*there is no such adapter"):
                await llm.pin_lora("pinned")
            second = await llm.add_lora(LoRARequest("changing", lora_path=str(folder)))
            assert second.digest != first.digest
            after = await tokens_of(llm, prompt, name, greedy())
            assert after == adapters.expected("stabilized", [prompt], 12)[0].token_ids != before
            await llm.pin_lora("changing")
            for other in ("one", "eight", "patterns", "bfloat16"):
                await tokens_of(llm, prompt, adapters.request(other), greedy(2))
            await until(lambda: recorder.scheduler_stats.num_running == 0)
            infos = {info.name: info for info in await llm.list_loras()}
            assert infos["changing"].is_pinned
            assert infos["changing"].num_loads == 1
            await llm.remove_lora("changing")
            with pytest.raises(UnknownAdapterError):
                await tokens_of(llm, prompt, name, greedy())

        run(llm, main)


def test_a_pinned_adapter_sleeps_and_a_beam_search_keeps_what_it_began_with(adapters: Any) -> None:
    prompt, request = PROMPTS[0], adapters.request("one")
    expected = expected_tokens(adapters)[0]
    with engine(adapters.base, **SETTINGS, step_seconds=0.02) as (llm, recorder):

        async def main() -> None:
            assert await tokens_of(llm, prompt, request, greedy()) == expected
            await llm.pin_lora("one")
            live = asyncio.create_task(tokens_of(llm, prompt, request, greedy(200)))
            await until(lambda: recorder.scheduler_stats.num_running > 0)
            await llm.sleep(2, mode="abort")
            await llm.wake_up()
            await asyncio.gather(live, return_exceptions=True)
            assert await tokens_of(llm, prompt, request, greedy()) == expected
            search = asyncio.create_task(
                llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=60), lora_request=LoRARequest("one"))
            )
            await until(lambda: bool(llm._output_processor.request_ids))
            await llm.remove_lora("one")
            assert len((await search).outputs) == 2

        run(llm, main)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_a_request_goes_on_with_its_weights_after_a_death(adapters: Any, num_tokens: int) -> None:
    expected = adapters.expected("eight", [PROMPTS[2]], 24)[0].token_ids
    with engine(adapters.base, **SETTINGS, step_seconds=0.02) as (llm, recorder):

        async def main() -> None:
            tokens: list[int] = []
            params = greedy(24, RequestOutputKind.DELTA)
            outputs = llm.generate(PROMPTS[2], params, lora_request=adapters.request("eight"))
            if num_tokens == 0:
                kill(llm)
            async for output in outputs:
                tokens += output.outputs[0].token_ids
                if num_tokens and len(tokens) >= num_tokens > len(tokens) - len(output.outputs[0].token_ids):
                    kill(llm)
            assert tokens == expected
            assert recorder.num_restarts == 1

        run(llm, main)


def test_a_request_whose_folder_has_changed_ends_when_its_engine_has_died(adapters: Any, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters.folders["eight"], folder)
    with engine(adapters.base, **SETTINGS, step_seconds=0.02) as (llm, _):

        async def interrupted(request: LoRARequest) -> None:
            is_killed = False
            async for _ in llm.generate(PROMPTS[2], greedy(60, RequestOutputKind.DELTA), lora_request=request):
                if not is_killed:
                    tensors = load_file(folder / "adapter_model.safetensors")
                    save_file({name: -one for name, one in tensors.items()}, folder / "adapter_model.safetensors")
                    kill(llm)
                    is_killed = True

        async def main() -> None:
            request = LoRARequest("adapter", lora_path=str(folder))
            with pytest.raises(RequestError, match="its files have changed since it was registered"):
                await interrupted(request)
            await llm.add_lora(request)
            await tokens_of(llm, PROMPTS[2], request, greedy())

        run(llm, main)


def test_an_engine_without_adapters_rejects_them(adapters: Any) -> None:
    with engine(adapters.base, kv_cache_memory_bytes=8 << 20) as (llm, _):

        async def main() -> None:
            with pytest.raises(UnknownAdapterError, match="LoRA feature is not enabled"):
                await tokens_of(llm, PROMPTS[0], adapters.request("one"), greedy())

        run(llm, main)


def test_a_bad_folder_of_the_settings_ends_the_start(adapters: Any, tmp_path: Path) -> None:
    shutil.copy(adapters.folders["one"] / "adapter_model.safetensors", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with (
        pytest.raises(CheckpointError, match="peft_type is 'IA3'"),
        engine(adapters.base, lora_modules={"bad": str(tmp_path)}, **SETTINGS),
    ):
        pass
