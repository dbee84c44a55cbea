"""Images on the CPU: encoding and prefill against transformers and llama.cpp, and what they cost streams beside them.

    python tests/benchmarks/pictures.py [--dtype bfloat16] [--quantization int8] [--tiles 2] [--rounds 3]
                                        [--seconds 20] [--threads 2]

A checkpoint of SmolVLM-256M's shapes with random weights (vision 768 × 12 layers, text 576 × 30 layers; a small
vocabulary). Encoding is the tower alone, and prefill the first token of a prompt whose image is encoded already; both
run in turn with transformers' own in this process. The third row is the first token of a prompt with a new image (a PNG
file), decoded, encoded and prefilled; with bfloat16 and several tiles it is llama.cpp's as well, whose server reads the
same weights, if `peers/setup.sh llamacpp` has installed it. (OpenVINO is not beside: optimum-intel 2.2 exports SmolVLM
with transformers 4.57.6 at most, and the environment of `peers/setup.sh openvino` has 5.5.) Then one engine serves two
streams of text, first alone, then beside images that are encoded one after the other: the gaps between a stream's
tokens, and images per second.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "benchmarks" / "peers")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gguf_file import convert, convert_tower  # noqa: E402
from llama_cpp import Connection  # noqa: E402
from PIL import Image  # noqa: E402
from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams  # noqa: E402
from quire_engine.encoders.family import as_arrays, find_family, load_processor  # noqa: E402
from quire_engine.encoders.towers.loading import load_tower  # noqa: E402
from quire_engine.frontend.tokenizer import load_tokenizer  # noqa: E402
from quire_kernels import cpu  # noqa: E402
from support.pictures import PICTURES, image_of, make_picture_checkpoint  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

TINYPY = ROOT / "model_repository" / "tinypy" / "1" / "model"
LLAMA_SERVER = Path(
    os.environ.get("QUIRE_BENCH_PEERS", Path.home() / ".cache" / "quire-bench" / "peers"), "llamacpp/bin/llama-server"
)
TILE = 512
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16,
    "image_size": TILE,
}  # fmt: skip
TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192,
}  # fmt: skip
QUESTION = "What is this? "
SETTINGS: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 2**29, "enable_prefix_caching": False}


def make(folder: Path, tiles: int) -> None:
    """A checkpoint whose images have `tiles` × `tiles` tiles, and a small one of the whole."""
    own = PICTURES["smolvlm"]
    text = {**own["config"]["text_config"], **TEXT}
    PICTURES["smolvlm"] = {
        **own, "config": {**own["config"], "vision_config": VISION, "scale_factor": 4, "text_config": text},
        "pixels": {"size": {"longest_edge": tiles * TILE}, "max_image_size": {"longest_edge": TILE}},
        "tokens": (*own["tokens"], "\n\n"),  # llama.cpp looks it up
    }  # fmt: skip
    make_picture_checkpoint(folder, "smolvlm", load_tokenizer(TINYPY))


@torch.inference_mode()
def in_turn(what: str, rounds: int, ours: Callable[[], Any], **others: Callable[[], Any]) -> None:
    """One row: median seconds of each, and how many times as fast ours is."""
    times: dict[str, list[float]] = {"ours": [], **{name: [] for name in others}}
    for number in range(rounds + 1):
        for name, function in {"ours": ours, **others}.items():
            start = perf_counter()
            function()
            if number:  # the first warms up
                times[name].append(perf_counter() - start)
    medians = {name: statistics.median(own) for name, own in times.items()}
    rows = [f"{name} {own:7.3f} s, ratio {own / medians['ours']:5.2f}" for name, own in medians.items() if own]
    print(f"{what:24} {'   '.join(rows)}", flush=True)


def png_of(image: Any) -> bytes:
    """An image's file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


@contextmanager
def llama_cpp(folder: Path, threads: int) -> Iterator[Callable[[bytes], Any]]:
    """llama.cpp's server with the checkpoint in bf16: an image's file → the first token of a prompt with it."""
    text, tower, address = (folder / name for name in ("text.gguf", "tower.gguf", "llama.sock"))
    convert(folder, text)
    convert_tower(folder, tower)
    command: list[str | Path] = [LLAMA_SERVER, "--model", text, "--mmproj", tower, "--host", address, "--parallel", "1"]
    command += ["--ctx-size", "4096", "--threads", str(threads), "--threads-batch", str(threads), "--no-ui"]
    server = subprocess.Popen([*command, "--log-verbosity", "1"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(method: str, path: str, **body: Any) -> Any:
        connection = Connection(str(address))
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return answer if response.status == 200 else None

    def is_ready() -> bool:
        try:
            return ask("GET", "/health") is not None
        except OSError:
            return False

    try:
        while not is_ready():
            if server.poll() is not None:
                raise SystemExit(f"llama-server did not start: {server.returncode}")
            time.sleep(0.05)
        marker = ask("GET", "/props")["media_marker"]

        def first_token(file: bytes) -> Any:
            prompt = {"prompt_string": QUESTION + marker, "multimodal_data": [base64.b64encode(file).decode()]}
            answer = ask("POST", "/completion", prompt=prompt, n_predict=1, cache_prompt=False)
            if answer is None:
                raise SystemExit("llama-server rejects the prompt")
            return answer

        yield first_token
    finally:
        server.terminate()
        server.wait()


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Encoding, prefill, and both."""
    family, dtype = find_family(folder), getattr(torch, options.dtype)
    assert family is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    tower = load_tower(folder, family, dtype, torch.device("cpu"), options.quantization)
    processor, side = load_processor(family, folder), options.tiles * TILE

    def tensors_of(image: Any) -> dict[str, torch.Tensor]:
        arrays = as_arrays(processor(images=[image], return_tensors="np", **family.arguments))
        return {name: torch.from_numpy(value) for name, value in arrays.items()}

    def theirs(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        pixels = {name: tensors[name] for name in ("pixel_values", "pixel_attention_mask")}
        pixels["pixel_values"] = pixels["pixel_values"].to(dtype)
        found = model.model.get_image_features(**pixels, return_dict=True).pooler_output
        return torch.cat(tuple(found)) if isinstance(found, list | tuple) else found

    image = image_of(side, side)
    tensors = tensors_of(image)
    name = options.quantization or options.dtype
    in_turn(f"encode {name}", options.rounds, lambda: tower(**tensors), transformers=lambda: theirs(tensors))
    settings = {**SETTINGS, "dtype": options.dtype, "quantization": options.quantization}
    llm = LLM(folder, **settings)
    torch.set_num_threads(options.threads)  # an engine leaves torch one
    params = SamplingParams(temperature=0, max_tokens=1)

    def ours(content: Any) -> list[int]:
        prompt = {"prompt": f"{QUESTION}<image>", "multi_modal_data": {"image": content}}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return output.prompt_token_ids

    ids = torch.tensor([ours(image)])
    hidden = model.get_input_embeddings()(ids)
    prefill = partial(model, use_cache=True, logits_to_keep=1)
    what = f"prefill of {ids.shape[1]} tokens"
    in_turn(what, options.rounds, lambda: ours(image), transformers=lambda: prefill(inputs_embeds=hidden))
    numbers = {name: count(1) for name in ("ours", "transformers", "llama.cpp")}

    def new_file(name: str) -> bytes:
        return files[next(numbers[name])]

    def whole() -> Any:
        states = theirs(tensors_of(np.asarray(Image.open(io.BytesIO(new_file("transformers"))))))
        is_image = (ids == family.image_token_id)[..., None]
        return prefill(inputs_embeds=hidden.masked_scatter(is_image, states.reshape(-1, hidden.shape[-1])))

    files = [png_of(image_of(side, side, seed=number)) for number in range(options.rounds + 2)]
    row = partial(in_turn, "image to first token", options.rounds, lambda: ours(new_file("ours")), transformers=whole)
    # llama.cpp has two images of one tile: the tile and the whole.
    if LLAMA_SERVER.exists() and options.dtype == "bfloat16" and options.tiles > 1:
        with llama_cpp(folder, options.threads) as first_token:
            row(**{"llama.cpp": lambda: first_token(new_file("llama.cpp"))})
    else:
        row()
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
    parser.add_argument("--quantization", choices=("int8",), help="ours alone")
    parser.add_argument("--tiles", type=int, default=2)
    parser.add_argument("--threads", type=int, default=cpu.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    cpu.set_num_threads(options.threads, torch_computes=True)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.tiles)
        compare(Path(folder), options)
        if options.seconds:
            settings = {"model": folder, "dtype": options.dtype, "quantization": options.quantization, **SETTINGS}
            llm = AsyncLLM(EngineConfig.from_settings(settings))
            try:
                asyncio.run(measure(llm, options.tiles, options.seconds))
            finally:
                llm.shutdown()


if __name__ == "__main__":
    main()
