"""Weights that are updated while the engine serves: the same tokens as those of an engine that started with them."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, AsyncLLM
from quire_engine.errors import EngineError, RequestError
from quire_engine.messages import LoadWeights, UseWeights
from support.checkpoints import changed_copy, edit_json
from support.engines import Stream, engine, kill, offline, params, run, until
from support.pictures import image_of

PROMPTS = [[5 + (i * n) % 60 for i in range(40)] for n in (1, 3)]
KV_CACHE_BYTES = 1 << 24


def other_weights(
    folder: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor] = lambda one: -one
) -> Path:
    """A copy of a checkpoint whose norms have other weights."""

    def change_norms(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: change(tensor).contiguous() for name, tensor in tensors.items() if "norm" in name}

    return changed_copy(folder, target, change_norms)


@pytest.fixture
def folders(checkpoint: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    return checkpoint("tied-gqa"), other_weights(checkpoint("tied-gqa"), tmp_path / "new")


async def tokens(llm: AsyncLLM) -> list[Any]:
    streams = [Stream(llm, prompt, params()) for prompt in PROMPTS]
    return [(await stream.task).outputs[0].token_ids for stream in streams]


def expected_tokens(folder: Path) -> list[Any]:
    return [outputs[0].token_ids for outputs in offline(folder, PROMPTS, params())]


@pytest.mark.parametrize(
    "settings",
    [{}, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"enable_prefix_caching": False}],
    ids=["one", "replicas", "ranks", "no-prefixes"],
)
def test_tokens_are_those_of_an_engine_that_started_with_them(
    folders: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    present, new = folders
    before, after = expected_tokens(present), expected_tokens(new)
    assert before != after

    async def main() -> None:
        assert await tokens(llm) == before
        live = Stream(llm, PROMPTS[0], params())
        await until(lambda: live.num_tokens > 0)
        updating = asyncio.ensure_future(llm.update_weights(str(new)))
        await until(lambda: llm._client.calls.busy is not None)
        held = Stream(llm, PROMPTS[0], params())
        await updating
        assert (await live.task).outputs[0].token_ids == before[0], "it ended with the weights that it began with"
        assert (await held.task).outputs[0].token_ids == after[0]
        assert await tokens(llm) == after
        assert llm.config.model.model == str(new)
        await llm.sleep(2)
        await llm.wake_up()
        assert await tokens(llm) == after
        kill(llm)
        await until(lambda: recorder.num_restarts == 1)
        assert await tokens(llm) == after, "the next engine reads the new folder"

    with engine(present, step_seconds=0.005, kv_cache_memory_bytes=KV_CACHE_BYTES, **settings) as (llm, recorder):
        run(llm, main)


def test_blocks_that_are_kept_elsewhere_are_those_of_their_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    present, new = folders
    tiers = [
        {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": {"max_bytes": 1 << 24}},
        {"kv_connector": "SharedStorageConnector",
         "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "blocks")}},
    ]  # fmt: skip
    transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": tiers}}  # fmt: skip
    before, after = expected_tokens(present), expected_tokens(new)

    async def main() -> None:
        async def loads() -> int:
            """Blocks that a request loads whose prefix is in no cache of the engine."""
            stats = recorder.scheduler_stats.kv_connector
            was = stats.num_loaded_blocks
            await llm.reset_prefix_cache()
            found = await tokens(llm)
            assert found == current
            return int(recorder.scheduler_stats.kv_connector.num_loaded_blocks - was)

        current = before
        assert await tokens(llm) == before
        await until(lambda: recorder.scheduler_stats.kv_connector.num_saved_blocks >= 4)
        assert await loads() > 0, "as long as the weights are the same"
        await llm.update_weights(str(new))
        current = after
        assert await loads() == 0
        await until(lambda: recorder.scheduler_stats.kv_connector.num_saved_blocks >= 8)
        assert await loads() > 0, "the new ones have blocks of their own"
        await llm.sleep(1)
        await llm.wake_up()
        assert await loads() > 0, "what is kept elsewhere survives a sleep"
        await llm.update_weights(str(present))
        current = before
        assert await loads() > 0, "those of the same files are the same"

    with engine(present, kv_cache_memory_bytes=KV_CACHE_BYTES, kv_transfer_config=transfer) as (llm, recorder):
        run(llm, main)


def test_a_folder_that_does_not_fit_is_named_and_the_weights_stay(
    folders: tuple[Path, Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    present, new = folders
    not_finite = other_weights(present, tmp_path / "nan", lambda one: one * float("nan"))
    truncated = shutil.copytree(present, tmp_path / "truncated")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    shapes = other_weights(present, tmp_path / "shapes", lambda one: torch.cat([one, one]))
    tokenizer = shutil.copytree(present, tmp_path / "tokenizer")
    (tokenizer / "tokenizer.json").write_text((tokenizer / "tokenizer.json").read_text() + " ")
    config = shutil.copytree(present, tmp_path / "config")
    fields = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**fields, "rms_norm_eps": 0.5}))
    vectors = shutil.copytree(present, tmp_path / "vectors")
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "pool"}]
    (vectors / "modules.json").write_text(json.dumps(modules))
    (vectors / "pool").mkdir()
    (vectors / "pool" / "config.json").write_text('{"pooling_mode": "mean"}')
    untokenized = shutil.copytree(present, tmp_path / "untokenized")
    (untokenized / "tokenizer.json").unlink()
    expected = expected_tokens(present)

    async def main() -> None:
        for path, words in (
            ("relative", "it must be the absolute path"),
            (None, "weights_path is null"),
            ("/a\ud800", "it must be the absolute path"),
            (str(tmp_path / "absent"), "there is no folder"),
            (str(truncated), "truncated"),
            (str(tokenizer), "its tokenizer is not that of"),
            (str(untokenized), "there is no tokenizer"),
            (str(config), "another model: rms_norm_eps is 0.5 there"),
            (str(checkpoint("tinypy")), "another model"),
            (str(vectors), "pooling_type of its vectors is 'MEAN', and 'LAST' in "),
        ):
            with pytest.raises(RequestError, match=words) as rejected:
                await llm.update_weights(path)  # type: ignore[arg-type]
            assert rejected.value.parameter == "weights_path"
        for path, words in ((str(not_finite), "weights must be finite"), (str(shapes), "has shape")):
            with pytest.raises(EngineError, match=words):
                await llm.update_weights(path)
            assert await tokens(llm) == expected
        assert llm.config.model.model == str(present)
        updating = asyncio.ensure_future(llm.update_weights(str(new)))
        await until(lambda: llm._client.calls.busy is not None)
        updating.cancel()
        await until(lambda: llm._client.calls.busy is None)
        assert await tokens(llm) != expected
        assert llm.config.model.model == str(new), "a caller that has left cancels nothing"

    with engine(present, kv_cache_memory_bytes=KV_CACHE_BYTES) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 0


def test_an_engine_that_loses_the_loaded_weights_is_started_with_them(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it dies between both calls: the other has the new weights already."""
    present, new = folders
    expected = expected_tokens(new)

    async def main() -> None:
        replica = llm._client.replicas[1]
        call = replica.call_utility

        async def forgets(what: Any) -> Any:
            if isinstance(what, LoadWeights):
                return True
            return await call(what)

        monkeypatch.setattr(replica, "call_utility", forgets)
        await llm.update_weights(str(new))
        assert await tokens(llm) == expected
        await until(lambda: recorder.num_restarts == 1)
        assert await tokens(llm) == expected

    with engine(present, kv_cache_memory_bytes=KV_CACHE_BYTES, data_parallel_size=2) as (llm, recorder):
        run(llm, main)


def test_a_model_that_drafts_drafts_for_the_new_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    present = checkpoint("tinypy")
    new = other_weights(present, tmp_path / "new", lambda one: one * 1.3)
    draft = {"method": "medusa", "model": str(present.parent / "medusa"), "num_speculative_tokens": 2}
    with_drafts = LLM(present, dtype="float32", kv_cache_memory_bytes=KV_CACHE_BYTES, speculative_config=draft)
    alone = LLM(new, dtype="float32", kv_cache_memory_bytes=KV_CACHE_BYTES)
    with_drafts._core.call_utility(LoadWeights(str(new)))
    with_drafts._core.call_utility(UseWeights(True))
    greedy = params(max_tokens=24)
    found, expected = (one.generate(PROMPTS, greedy, use_tqdm=False) for one in (with_drafts, alone))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


def test_the_part_for_images_stays_as_it_is(picture_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    present = picture_checkpoint("gemma3")

    def change(tensors: dict[str, torch.Tensor], part: str) -> None:
        tensors |= {name: -tensor for name, tensor in tensors.items() if part in name and "norm" in name}

    text = changed_copy(present, tmp_path / "text", lambda tensors: change(tensors, "language_model."))
    tower = changed_copy(present, tmp_path / "tower", lambda tensors: change(tensors, "vision_tower."))
    settings = shutil.copytree(present, tmp_path / "settings")
    edit_json(settings / "preprocessor_config.json", image_mean=[0.1, 0.1, 0.1])
    image = image_of(28, 28)

    async def answer(llm: AsyncLLM) -> Any:
        prompt = {"prompt": "a <start_of_image> b", "multi_modal_data": {"image": image}}
        return (await Stream(llm, prompt, params()).task).outputs[0].token_ids

    async def main() -> None:
        before = await answer(llm)
        for folder, what in ((tower, r"vision_tower\..*norm"), (settings, "preprocessor_config.json")):
            with pytest.raises(RequestError, match=f"{what}.* is not that of .*, and the part for images keeps"):
                await llm.update_weights(str(folder))
            assert await answer(llm) == before
        await llm.update_weights(str(text))
        assert await answer(llm) != before

    with engine(present, kv_cache_memory_bytes=KV_CACHE_BYTES) as (llm, _):
        run(llm, main)
