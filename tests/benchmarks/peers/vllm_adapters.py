"""vLLM's CPU build with LoRA adapters: how long a decode step takes.

    python peers/vllm_adapters.py JOB

JOB is a file that `adapters.py --vllm` writes, and whose results this one replaces::

    {"model": …, "settings": {…}, "threads": 2, "prompts": [[…], …], "folders": […], "adapters": [0, 1, 8],
     "lengths": [4, 36], "rounds": 5}
    {"version": …, "seconds": {"0": […], "1": […], "8": […]}}       by the number of adapters, a step's of each round

A step's time is the difference between two runs of the same prompts, which generate as many tokens as `lengths` says.
"""

import json
import sys
import time
from pathlib import Path

import runner
from vllm_cpu import VLLM


def main() -> None:
    """See the module's docstring."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    engine = VLLM(
        runner.Arguments(
            model=Path(job["model"]), variant="all_cores", threads=job["threads"], prefix_caching=True,
            settings=json.dumps(job["settings"]),
        )
    )  # fmt: skip
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    requests = [LoRARequest(str(number), number + 1, folder) for number, folder in enumerate(job["folders"])]

    def run(num_tokens: int, num_adapters: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        adapters = [requests[row % num_adapters] for row in range(len(prompts))] if num_adapters else None
        start = time.perf_counter()
        engine.llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        return time.perf_counter() - start

    first, last = job["lengths"]
    seconds: dict[int, list[float]] = {number: [] for number in job["adapters"]}
    for number in seconds:  # loads them, and warms up
        run(first, number)
    for turn in range(job["rounds"]):
        for number in list(seconds)[:: -1 if turn % 2 else 1]:
            seconds[number].append((run(last, number) - run(first, number)) / (last - first))
    path.write_text(json.dumps({"version": engine.version, "seconds": seconds}))


if __name__ == "__main__":
    main()
