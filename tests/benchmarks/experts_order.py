"""What it costs that a token's experts are added in one order, whatever is beside it in the batch.

    python tests/benchmarks/experts_order.py [--tokens 1 64] [--rounds 40]

The linears of experts owe the promise nothing: each result is one sum over its inputs in any case. What is done for it
is that results wait in float32 until all are there, and are then added in the order of the token's experts. So the op
is timed as it is and compiled without that last pass, in turn: the time of the pass is the most that the promise can
cost, as in any order the results have to be added somewhere. Compiling takes a minute.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from checkpoints import MIXTURES
from quire_kernels import cpu, pack_experts, pack_linear, routed_experts

ROOT = Path(__file__).resolve().parents[2]
PASS_BEGINS = "  for_each_row(tokens, has_many, [&](int64_t t) {\n    if (call.is_float || call.out_is_float)"
PASS_ENDS = "}\n\n// Activations of experts have 8 bits"


def library_without_the_pass(folder: Path) -> ctypes.CDLL:
    """The C++ kernels, but that the results of experts are not added to a token's."""
    for path in (ROOT / "kernels" / "csrc").iterdir():
        text = path.read_text(encoding="utf-8")
        if path.name == "experts.inc":
            before, _, rest = text.partition(PASS_BEGINS)
            _, end, after = rest.partition(PASS_ENDS)
            if not end:
                raise SystemExit(f"{path} has changed: this script does not find the pass in it any more")
            text = before + end + after
        (folder / path.name).write_text(text, encoding="utf-8")
    library = folder / "without.so"
    flags = ["-shared", "-fPIC", "-O3", "-std=c++17", "-pthread", "-fvisibility=hidden", "-w"]
    subprocess.run(["g++", *flags, *map(str, folder.glob("*.cpp")), "-o", str(library)], check=True)
    handle = ctypes.CDLL(str(library))
    handle.quire_set_threads.argtypes = [ctypes.c_int64]
    handle.quire_select(str(cpu.status().instruction_set).encode())
    handle.quire_set_threads(torch.get_num_threads())
    return handle


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    status = cpu.status()
    if status.handle is None:
        raise SystemExit(f"there are no C++ kernels: {status.reason}")
    hidden, size, *_, num_experts, top_k = MIXTURES["e1b"]
    with tempfile.TemporaryDirectory() as folder:
        libraries = {"with": status.handle, "without": library_without_the_pass(Path(folder))}
    gate_up = [pack_linear(torch.randn(2 * size, hidden).bfloat16(), gated=True) for _ in range(num_experts)]
    down = [pack_linear(torch.randn(hidden, size).bfloat16()) for _ in range(num_experts)]
    experts = pack_experts(gate_up, down, torch.arange(num_experts))
    for tokens in arguments.tokens:
        seconds: dict[str, list[float]] = {name: [] for name in libraries}
        for number in range(arguments.rounds):
            x = torch.randn(tokens, hidden).bfloat16()
            weights, ids = torch.rand(tokens, num_experts).softmax(1).topk(top_k)
            for name in sorted(libraries, reverse=number % 2 == 1):
                status.handle = libraries[name]
                routed_experts(x, weights, ids, experts)  # the experts' weights come from memory, or not, for both
                began = time.perf_counter()
                routed_experts(x, weights, ids, experts)
                seconds[name].append(time.perf_counter() - began)
        status.handle = libraries["with"]
        whole = statistics.median(seconds["with"])
        part = statistics.median(1 - b / a for a, b in zip(seconds["with"], seconds["without"], strict=True))
        print(f"{tokens:4} tokens  {1e6 * whole:8.0f} µs  of which the pass {100 * part:5.2f}%", flush=True)


if __name__ == "__main__":
    main()
