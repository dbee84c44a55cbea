"""OpenVINO GenAI's continuous batching on the CPU. Weights: fp16, int8, int4. The command line is in runner.py.

It computes in bf16 where the processor can, whatever the weights are stored in, and keeps its KV cache as f16 for fp16
weights and as u8 for others, unless told otherwise. Settings are properties of the pipeline, but for those of each
request's `GenerationConfig`: `num_assistant_tokens` and `max_ngram_size`, which `prompt_lookup` wants.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import runner

KV_CACHE_GIB = 4
GENERATION_SETTINGS = ("num_assistant_tokens", "max_ngram_size")


def converted_folder(arguments: runner.Arguments) -> Path:
    """Where the files of a variant are."""
    return arguments.converted / "openvino" / f"{arguments.model.name}-{arguments.variant}"


def prepare(arguments: runner.Arguments) -> None:
    """Convert the checkpoint with optimum-intel: a minute or two, once."""
    folder = converted_folder(arguments)
    if folder.exists():
        return
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", arguments.model]
    command += ["--task", "text-generation-with-past", "--weight-format", arguments.variant, partial]
    if arguments.variant == "int4":  # groups of 128, or smaller ones where a row is no multiple of it
        command += ["--group-size-fallback", "adjust"]
    subprocess.run([str(part) for part in command], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    partial.rename(folder)


class OpenVINO:
    """`ContinuousBatchingPipeline`."""

    def __init__(self, arguments: runner.Arguments) -> None:
        import openvino_genai

        self.version = version("openvino-genai")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = arguments.prefix_caching
        settings = json.loads(arguments.settings)
        self.generation_settings = {name: settings.pop(name) for name in GENERATION_SETTINGS if name in settings}
        properties = {"INFERENCE_NUM_THREADS": arguments.threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(converted_folder(arguments)), scheduler, "CPU", properties | settings
        )

    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """All at once."""
        import numpy as np
        import openvino
        import openvino_genai

        tensors, configs = [], []
        for prompt, length in zip(prompts, output_lengths, strict=True):
            tensors.append(openvino.Tensor(np.array([prompt], dtype=np.int64)))
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = length, True
            config.do_sample, config.apply_chat_template = False, False
            for name, value in self.generation_settings.items():
                setattr(config, name, value)
            configs.append(config)
        return [list(result.m_generation_ids[0]) for result in self.pipeline.generate(tensors, configs)]

    def reset(self, workload: str) -> None:
        """It cannot empty its prefix cache; compare.py never repeats a prompt where that is on."""

    def close(self) -> None:
        """It has no processes."""


if __name__ == "__main__":
    runner.main(OpenVINO, prepare)
