"""Hugging Face transformers. Variants: static16, continuous. The command line is in runner.py.

`static16` runs left-padded batches of 16, each to its longest output; only the tokens that were asked for count.
`continuous` is its continuous batching over a paged cache. Both compute in bfloat16, and where the processor has no
instructions for it, as with AVX2 alone, in float32: there its bfloat16 takes many times as long.
"""

import runner
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

DTYPE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
BATCH = 16
PAGE_TOKENS = 32
CACHE_TOKENS = 64 * 640
"""For all requests of any workload at once."""


class StaticBatches:
    """`generate`, batch after batch."""

    def __init__(self, arguments: runner.Arguments) -> None:
        if "long_context" in arguments.workloads:
            raise SystemExit("static batches have no prefix cache, which long_context reads")
        torch.set_num_threads(arguments.threads)
        self.version = transformers.__version__
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPE).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """In batches of `BATCH`."""
        made: list[list[int]] = []
        for i in range(0, len(prompts), BATCH):
            made += self._batch(prompts[i : i + BATCH], output_lengths[i : i + BATCH])
        return made

    def _batch(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        width, longest = max(map(len, prompts)), max(output_lengths)
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(
            max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        output = self.model.generate(input_ids, attention_mask=mask, generation_config=config)
        assert output.shape[1] == width + longest
        return [row[:length] for row, length in zip(output[:, width:].tolist(), output_lengths, strict=True)]

    def reset(self, workload: str) -> None:
        """It has no prefix cache."""

    def close(self) -> None:
        """It has no processes."""


class ContinuousBatching:
    """A `ContinuousBatchingManager`."""

    def __init__(self, arguments: runner.Arguments) -> None:
        torch.set_num_threads(arguments.threads)
        self.version = transformers.__version__
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=DTYPE, attn_implementation="paged|eager"
        ).eval()
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=CACHE_TOKENS // PAGE_TOKENS,
            max_batch_tokens=2048,
            allow_block_sharing=arguments.prefix_caching,
        )
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16),
            continuous_batching_config=config,
        )
        self.manager.start()

    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """All at once."""
        ids = [
            self.manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(prompts, output_lengths, strict=True)
        ]
        outputs = {}
        while len(outputs) < len(ids):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
            elif result is None and not self.manager.is_running():
                raise SystemExit("its thread has ended")
        return [outputs[request_id] for request_id in ids]

    def reset(self, workload: str) -> None:
        """It cannot empty its prefix cache; compare.py never repeats a prompt where that is on."""

    def close(self) -> None:
        """End its thread."""
        self.manager.stop(block=True)


def load(arguments: runner.Arguments) -> runner.Engine:
    """By the variant."""
    return ContinuousBatching(arguments) if arguments.variant == "continuous" else StaticBatches(arguments)


if __name__ == "__main__":
    runner.main(load)
