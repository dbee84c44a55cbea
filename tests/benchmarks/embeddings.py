"""Sentences per second of encoders: ours, transformers', ONNX Runtime's and OpenVINO's, with the same threads.

    python tests/benchmarks/embeddings.py [--models minilm bert-base] [--lengths 16 128 512] [--batches 1 32]
                                          [--seconds 2] [--rounds 3] [--threads 2] [--json FILE]

minilm is all-MiniLM-L6-v2 (real weights); bert-base has BERT's shape and random ones. Each engine is a process in an
environment of its own (peers/setup.sh), which takes token ids and returns the mean of each sentence's hidden states.
Engines take turns, and of the rounds the best counts: what else runs on a machine only makes an engine slower. The last
column says how many times as fast ours is as the best other engine of the same precision.

This file is the script of each engine, too: `python embeddings.py --engine NAME` computes what standard input asks for,
a JSON line each, and answers with the seconds that each call took.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINES = {
    "quire fp32": None, "quire bf16": None, "quire int8": None, "torch fp32": None, "torch bf16": None,
    "onnxruntime fp32": "onnxruntime", "onnxruntime int8": "onnxruntime", "openvino fp32": "openvino",
    "openvino bf16": "openvino", "openvino int8": "openvino",
}  # fmt: skip
"""Engine and precision → the peer whose environment it needs; None: ours."""
MAX_TOKENS = {"minilm": 256, "bert-base": 512}
"""Of the longest sentence that the checkpoint takes."""
MAX_BATCH_TOKENS = 16384
"""Larger batches are left out: they only take longer."""
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}

Encode = Callable[[list[list[int]]], Any]
"""Sentences' token ids → [sentences, E]"""


def with_quire(model: Path, precision: str, threads: int) -> Encode:
    from quire_engine import LLM, PoolingParams

    llm = LLM(
        str(model), dtype="float32" if precision == "fp32" else "bfloat16", weight_cache_dir="", max_num_seqs=64,
        max_num_batched_tokens=8192, quantization="int8" if precision == "int8" else None,
    )  # fmt: skip
    params = PoolingParams(task="embed", pooling_type="MEAN", normalize=False)
    return lambda batch: llm.encode([{"prompt_token_ids": one} for one in batch], params, use_tqdm=False)


def with_torch(model: Path, precision: str, threads: int) -> Encode:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    encoder = AutoModel.from_pretrained(model, dtype=dtype).eval()

    def encode(batch: list[list[int]]) -> Any:
        with torch.inference_mode():
            ids = torch.tensor(batch)
            return encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)

    return encode


def with_onnxruntime(model: Path, precision: str, threads: int) -> Encode:
    import numpy as np
    import onnxruntime as ort
    import torch
    from onnxruntime.quantization import quantize_dynamic
    from transformers import AutoModel

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.mean(1)

    file = model / "model.onnx"
    if not file.exists():
        ids = torch.ones(2, 16, dtype=torch.int64)
        axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
        torch.onnx.export(Mean(), (ids, ids), file, dynamo=True, dynamic_shapes=(axes, axes))
    if precision == "int8":
        quantized = model / "model-int8.onnx"
        if not quantized.exists():
            quantize_dynamic(file, quantized)
        file = quantized
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def encode(batch: list[list[int]]) -> Any:
        ids = np.array(batch, dtype=np.int64)
        return session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]

    return encode


def with_openvino(model: Path, precision: str, threads: int) -> Encode:
    import numpy as np
    import openvino as ov
    import torch
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    ids = torch.ones(2, 16, dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    inputs = {"input_ids": ids, "attention_mask": ids}
    graph = ov.convert_model(torch.export.export(encoder, (), inputs, dynamic_shapes=dict.fromkeys(inputs, axes)))
    if precision == "int8":
        import nncf

        generator = np.random.default_rng(0)
        samples = [
            {"input_ids": one, "attention_mask": np.ones_like(one)}
            for one in (generator.integers(1000, 20000, (1, 128)) for _ in range(50))
        ]
        graph = nncf.quantize(graph, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
    compiled = ov.compile_model(graph, "CPU", {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else "bf16",
    })  # fmt: skip

    def encode(batch: list[list[int]]) -> Any:
        array = np.array(batch, dtype=np.int64)
        return compiled([array, np.ones_like(array)])[0].mean(1)

    return encode


def serve(engine: str, model: Path, threads: int) -> None:
    """Compute what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints
    name, precision = engine.split()
    make = {"quire": with_quire, "torch": with_torch, "onnxruntime": with_onnxruntime, "openvino": with_openvino}
    encode = make[name](model, precision, threads)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        batches = [
            [[1000 + (31 * i + 7 * j + 97 * k) % 19000 for j in range(job["length"])] for i in range(job["batch"])]
            for k in range(8)
        ]
        seconds: list[float] = []
        end = time.perf_counter() + job["seconds"]
        encode(batches[0])
        while time.perf_counter() < end or len(seconds) < 3:
            start = time.perf_counter()
            encode(batches[len(seconds) % 8])
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), file=answers, flush=True)


def make_model(name: str, cache: Path) -> Path:
    """The checkpoint's folder."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from support.real_models import minilm

    if name == "minilm":
        return minilm()
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = cache / "checkpoints" / name
    if not (folder / "tokenizer.json").exists():
        torch.manual_seed(0)
        BertModel(BertConfig(**BASE)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)
    return folder


def start(engine: str, model: Path, threads: int, cache: Path) -> subprocess.Popen[str] | None:
    peer, python = ENGINES[engine], sys.executable
    if peer is not None:
        python = str(Path(os.environ.get("QUIRE_BENCH_PEERS", cache / "peers")) / peer / "bin" / "python")
        if not Path(python).exists():
            print(f"passed over: {engine} (peers/setup.sh {peer})", file=sys.stderr)
            return None
    command = [python, __file__, "--engine", engine, "--model", str(model), "--threads", str(threads)]
    log = (cache / f"embeddings-{engine.replace(' ', '-')}.log").open("w")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    if not process.stdout.readline():
        print(f"passed over: {engine}; see {log.name}", file=sys.stderr)
        return None
    return process


def measure(processes: dict[str, "subprocess.Popen[str]"], job: dict[str, Any], rounds: int) -> dict[str, float]:
    """Engine → sentences per second."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for engine, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(job), file=process.stdin, flush=True)
            seconds = sorted(json.loads(process.stdout.readline()))
            rate = job["batch"] / seconds[len(seconds) // 2]
            best[engine] = max(best.get(engine, 0.0), rate)
    return best


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["minilm", "bert-base"], default=["minilm", "bert-base"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        serve(arguments.engine, arguments.model, arguments.threads)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Run the engines in turn, and print a table."""
    from harness.engines import cache_folder
    from harness.machine import describe_machine

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    figures = []
    for name in arguments.models:
        model = make_model(name, cache_folder())
        started = {one: start(one, model, arguments.threads, cache_folder()) for one in arguments.engines}
        processes = {one: process for one, process in started.items() if process is not None}
        for length in dict.fromkeys(min(one, MAX_TOKENS[name]) for one in arguments.lengths):
            for batch in (one for one in arguments.batches if one * length <= MAX_BATCH_TOKENS):
                job = {"length": length, "batch": batch, "seconds": arguments.seconds}
                rates = measure(processes, job, arguments.rounds)
                for engine, rate in rates.items():
                    figures.append({"model": name, **job, "engine": engine, "sentences_per_second": rate})
                show(name, length, batch, rates)
        for process in processes.values():
            process.communicate()
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "figures": figures}, indent=1) + "\n")


def show(name: str, length: int, batch: int, rates: dict[str, float]) -> None:
    """A line for each precision."""
    for precision in ("fp32", "bf16", "int8"):
        own = {engine: rate for engine, rate in rates.items() if engine.endswith(precision)}
        if not own:
            continue
        ours, others = own.pop(f"quire {precision}", None), own
        gain = f"{ours / max(others.values()):5.2f}x" if ours and others else "     -"
        columns = "  ".join(f"{engine.split()[0]} {rate:9.1f}" for engine, rate in others.items())
        print(f"{name:10}{length:5}{batch:4}  {precision}  quire {ours or 0:9.1f}  {columns}  {gain}", flush=True)


if __name__ == "__main__":
    main()
