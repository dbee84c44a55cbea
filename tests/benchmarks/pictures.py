"""Images on the CPU: encoding and prefill against transformers, and what encoding costs the streams beside it.

    python tests/benchmarks/pictures.py [--dtype bfloat16] [--tiles 2] [--rounds 3] [--seconds 20]

A checkpoint of SmolVLM-256M's shapes with random weights (vision 768 × 12 layers, text 576 × 30 layers; a small
vocabulary). Encoding is the tower alone, and prefill the first token of a prompt whose image is encoded already; both
run in turn with transformers' own in this process. Then one engine serves two streams of text, first alone, then beside
images that are encoded one after the other: the gaps between a stream's tokens, and images per second.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams  # noqa: E402
from quire_engine.encoders.family import as_arrays, find_family, load_processor  # noqa: E402
from quire_engine.encoders.towers.loading import load_tower  # noqa: E402
from quire_engine.frontend.tokenizer import load_tokenizer  # noqa: E402
from support.pictures import PICTURES, image_of, make_picture_checkpoint  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

TINYPY = ROOT / "model_repository" / "tinypy" / "1" / "model"
TILE = 512
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16,
    "image_size": TILE,
}  # fmt: skip
TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 2**29, "enable_prefix_caching": False}


def make(folder: Path, tiles: int) -> None:
    """A checkpoint whose images have `tiles` × `tiles` tiles, and a small one of the whole."""
    own = PICTURES["smolvlm"]
    text = {**own["config"]["text_config"], **TEXT}
    PICTURES["smolvlm"] = {
        **own, "config": {**own["config"], "vision_config": VISION, "scale_factor": 4, "text_config": text},
        "pixels": {"size": {"longest_edge": tiles * TILE}, "max_image_size": {"longest_edge": TILE}},
    }  # fmt: skip
    make_picture_checkpoint(folder, "smolvlm", load_tokenizer(TINYPY))


@torch.inference_mode()
def in_turn(rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of both."""
    times: tuple[list[float], list[float]] = [], []
    for number in range(rounds + 1):
        for function, own in zip((ours, theirs), times, strict=True):
            start = perf_counter()
            function()
            if number:  # the first warms up
                own.append(perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def show(what: str, ours: float, theirs: float) -> None:
    """One row."""
    print(f"{what:24} ours {ours:7.3f} s   transformers {theirs:7.3f} s   ratio {theirs / ours:5.2f}", flush=True)


def compare(folder: Path, dtype: str, tiles: int, rounds: int) -> None:
    """Encoding and prefill."""
    family, torch_dtype = find_family(folder), getattr(torch, dtype)
    assert family is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch_dtype).eval()
    tower = load_tower(folder, family, torch_dtype, torch.device("cpu"))
    image = image_of(tiles * TILE, tiles * TILE)
    arrays = as_arrays(load_processor(family, folder)(images=[image], return_tensors="np", **family.arguments))
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    pixels = {name: tensors[name] for name in ("pixel_values", "pixel_attention_mask")}
    pixels["pixel_values"] = pixels["pixel_values"].to(torch_dtype)
    show(
        f"encode {dtype}", *in_turn(rounds, lambda: tower(**tensors), lambda: model.model.get_image_features(**pixels))
    )
    llm = LLM(folder, dtype=dtype, **SETTINGS)
    prompt = {"prompt": "What is this? <image>", "multi_modal_data": {"image": image}}
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    hidden = model.get_input_embeddings()(torch.tensor([output.prompt_token_ids]))
    what = f"prefill of {len(output.prompt_token_ids)} tokens"
    show(
        what,
        *in_turn(
            rounds,
            lambda: llm.generate([prompt], params, use_tqdm=False),
            lambda: model(inputs_embeds=hidden, use_cache=True, logits_to_keep=1),
        ),
    )
    llm.shutdown()


async def measure(llm: AsyncLLM, tiles: int, seconds: float) -> None:
    """Gaps of two streams, without images and with them."""
    end, gaps, num_images = 0.0, list[float](), 0
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def stream(number: int) -> None:
        before: float | None = None
        async for _ in llm.generate([5, 6 + number], params):
            now = perf_counter()
            gaps.extend([] if before is None else [now - before])
            before = now
            if now > end:
                return

    async def encode() -> None:
        nonlocal num_images
        while perf_counter() < end:
            image = image_of(tiles * TILE, tiles * TILE, seed=1 + num_images)
            prompt = {"prompt": "<image>", "multi_modal_data": {"image": image}}
            async for _ in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1)):
                num_images += 1

    for has_images in (False, True):
        gaps.clear()
        if has_images:  # the tower and its threads are warm after the first
            end = 1.0
            await asyncio.gather(stream(0), encode_once(llm, tiles))
            gaps.clear()
        start = perf_counter()
        end = start + seconds
        await asyncio.gather(stream(0), stream(1), *([encode()] if has_images else []))
        rate = num_images / (perf_counter() - start)
        ordered = sorted(gaps)
        what = "beside images" if has_images else "streams alone"
        print(
            f"{what:16} gaps: median {1e3 * statistics.median(ordered):6.1f} "
            f"ms, p99 {1e3 * ordered[int(0.99 * len(ordered))]:6.1f} ms, longest {1e3 * ordered[-1]:6.1f} ms; "
            f"{rate:.2f} images/s", flush=True,
        )  # fmt: skip


async def encode_once(llm: AsyncLLM, tiles: int) -> None:
    """Start the processes."""
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": image_of(tiles * TILE, tiles * TILE)}}
    async for _ in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1)):
        pass


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tiles", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.tiles)
        compare(Path(folder), options.dtype, options.tiles, options.rounds)
        llm = AsyncLLM(EngineConfig.from_settings({"model": folder, "dtype": options.dtype, **SETTINGS}))
        try:
            asyncio.run(measure(llm, options.tiles, options.seconds))
        finally:
            llm.shutdown()


if __name__ == "__main__":
    main()
