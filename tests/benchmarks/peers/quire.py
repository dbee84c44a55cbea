"""Our own engine, offline through `LLM`. Variants: bf16; int8 and int4, quantised at load; those of llama.cpp, whose
GGUF files it reads. The command line is in runner.py.
"""

import json
import threading
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import runner
from llama_cpp import model_file
from quire_engine import LLM, SamplingParams

FORMATS = {"bf16": {}, "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}


def settings(arguments: runner.Arguments) -> dict[str, Any]:
    """As in `model.json`."""
    plain = {
        "model": str(arguments.model if arguments.variant in FORMATS else model_file(arguments, arguments.variant)),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 4 * 2**30,  # as every engine here
        "enable_prefix_caching": arguments.prefix_caching,
        "weight_cache_dir": str(arguments.converted.resolve() / "quire"),
    }
    further: dict[str, Any] = json.loads(arguments.settings)
    return plain | FORMATS.get(arguments.variant, {}) | further


def pack_weights(arguments: runner.Arguments) -> None:
    """Keep the packed weights in a file, so that no run writes it; what the engine does not know is found out, too."""
    llm = LLM(**settings(arguments))
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join()
    llm.shutdown()


class Quire:
    """`LLM`, which is the engine core and its worker in this process."""

    def __init__(self, arguments: runner.Arguments) -> None:
        self.llm = LLM(**settings(arguments))
        try:
            self.version = version("quire")
        except PackageNotFoundError:  # from the source folder
            self.version = "source"

    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """All at once."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lengths],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def reset(self, workload: str) -> None:
        """Empty the prefix cache."""
        self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End the workers."""
        self.llm.shutdown()


if __name__ == "__main__":
    runner.main(Quire, pack_weights)
