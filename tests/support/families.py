"""Every architecture with layers of our own, and what is tested of each: the rows and columns of docs/models.md.

Run as a script, this runs the tests, and writes the page's table from their outcomes::

    .venv/bin/python tests/support/families.py
"""

import os
import sys
from collections.abc import Collection, Generator
from pathlib import Path

import pytest

__all__ = ["COLUMNS", "FAMILIES", "OF_EACH_KIND", "PAGE", "PAIRS", "rendered", "with_table"]

FAMILIES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "AyaVisionForConditionalGeneration": "aya-vision",
    "BambaForCausalLM": "bamba",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2-moe",
    "Cohere2VisionForConditionalGeneration": "cohere2-vision",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek-v2",
    "DeepseekV32ForCausalLM": "deepseek-v32",
    "DeepseekV3ForCausalLM": "deepseek-v3",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4-5",
    "Ernie4_5_MoeForCausalLM": "ernie4-5-moe",
    "Exaone4ForCausalLM": "exaone4",
    "Exaone4_5_ForConditionalGeneration": "exaone4-conditional",
    "ExaoneForCausalLM": "exaone",
    "ExaoneMoeForCausalLM": "exaone-moe",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon-h1",
    "FalconMambaForCausalLM": "falcon-mamba",
    "GPTNeoXForCausalLM": "gpt-neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3-conditional",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n-conditional",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4-conditional",
    "Gemma4UnifiedForConditionalGeneration": "gemma4-unified",
    "GemmaForCausalLM": "gemma",
    "Glm46VForConditionalGeneration": "glm46v",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4-moe",
    "Glm4MoeLiteForCausalLM": "glm4-moe-lite",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v-moe",
    "GlmForCausalLM": "glm",
    "GlmMoeDsaForCausalLM": "glm-moe-dsa",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite-moe",
    "GraniteMoeHybridForCausalLM": "granite-hybrid",
    "GraniteMoeSharedForCausalLM": "granite-moe-shared",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
    "JambaForCausalLM": "jamba",
    "KimiLinearForCausalLM": "kimi-linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2-moe",
    "Lfm3ForCausalLM": "lfm3",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4-conditional",
    "LlamaForCausalLM": "tied-gqa",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava-next",
    "LlavaOnevisionForConditionalGeneration": "llava-onevision",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MellumForCausalLM": "mellum",
    "MiMoForCausalLM": "mimo",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral3-conditional",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron-h",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoHybridForCausalLM": "olmo-hybrid",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2-moe",
    "Qwen2VLForConditionalGeneration": "qwen2-vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2-5-vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3-moe",
    "Qwen3NextForCausalLM": "qwen3-next",
    "Qwen3VLForConditionalGeneration": "qwen3-vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3-vl-moe",
    "Qwen3_5ForCausalLM": "qwen3-5",
    "Qwen3_5ForConditionalGeneration": "qwen3-5-conditional",
    "Qwen3_5MoeForCausalLM": "qwen3-5-moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3-5-moe-conditional",
    "RecurrentGemmaForCausalLM": "recurrent-gemma",
    "SeedOssForCausalLM": "seed-oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "VaultGemmaForCausalLM": "vaultgemma",
    "Zamba2ForCausalLM": "zamba2",
}
"""Architecture → its checkpoint among the oracle's, which two ranks and two stages can share."""
OF_EACH_KIND = (
    "BambaForCausalLM", "Cohere2MoeForCausalLM", "DeepseekV2ForCausalLM", "FalconMambaForCausalLM",
    "Gemma3nForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Glm46VForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM",
    "KimiLinearForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM",
    "NemotronHForCausalLM", "RecurrentGemmaForCausalLM", "Zamba2ForCausalLM",
)  # fmt: skip
"""Families that between them have each kind of layer."""
COLUMNS = ("exact", "tensor parallel", "pipeline parallel", "int8", "speculation", "prefix caching", "replay")
PAIRS = [(architecture, column) for architecture in FAMILIES for column in COLUMNS]
"""Each is a test of its own with QUIRE_TESTS_FULL=1."""
ROOT = Path(__file__).resolve().parents[2]
PAGE, TESTS = ROOT / "docs" / "models.md", ROOT / "tests" / "unit" / "engine" / "models" / "test_every_family.py"
BEGIN, END = "<!-- the table: made by the tests -->\n", "<!-- the end of the table -->\n"


def rendered(shown: Collection[tuple[str, str]]) -> str:
    """The table.

    Args:
        shown: pairs of architecture and column whose test has passed.
    """
    rows = [("Architecture", *COLUMNS), ("---", *[":-:"] * len(COLUMNS))]
    rows += [(f"`{one}`", *("✓" if (one, column) in shown else "" for column in COLUMNS)) for one in FAMILIES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str, table: str) -> str:
    """A page with another table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


class Outcomes:
    """A plugin of pytest that notes what has passed."""

    def __init__(self) -> None:
        self.passed: set[tuple[str, str]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" and report.passed:
            self.passed.add((item.callspec.params["architecture"], item.callspec.params["check"]))
        return report


def main() -> int:
    os.environ["QUIRE_TESTS_FULL"] = "1"
    outcomes = Outcomes()
    code = int(pytest.main([f"{TESTS}::test_a_family", "-q"], plugins=[outcomes]))
    PAGE.write_text(with_table(PAGE.read_text(), rendered(outcomes.passed)))
    print(f"{PAGE}: {len(outcomes.passed)} of {len(PAIRS)} cells")
    return code


if __name__ == "__main__":
    sys.exit(main())
