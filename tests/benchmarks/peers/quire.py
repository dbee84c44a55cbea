"""Our own engine, offline through `LLM`. Variants: bf16; int8 and int4, quantised at load; those of llama.cpp, whose
GGUF files it reads. The command line is in runner.py.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import runner
from llama_cpp import model_file
from quire_engine import LLM, SamplingParams
from quire_engine.config import EngineConfig

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
    }
    further: dict[str, Any] = json.loads(arguments.settings)
    return plain | FORMATS.get(arguments.variant, {}) | further


def check_settings(arguments: runner.Arguments) -> None:
    """There is nothing to convert. Settings that the engine does not know fail here, before anything is measured."""
    EngineConfig.from_settings(settings(arguments))


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
    runner.main(Quire, check_settings)
