"""The whole engine on each of the kernels' ways that this machine has and would not choose by itself.

The kernels' own tests hold every instruction set to the definition of its op. Here a process that was told which one to
use runs some of the engine's tests: tokens that are those of transformers, and those of a request alone, in any batch.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_kernels import cpu
from support.processes import ended, start_python

pytestmark = pytest.mark.slow

ENGINE_TESTS = Path(__file__).parent
EXACT = [
    # Prefill in chunks, prefix hits, decodes, preemption; a tied head; two query heads to a KV head.
    "test_token_exact.py::test_64_requests_are_token_exact[tied-gqa-True-16-True]",
    # A head of its own; biases, one KV head, and a head size that the attention kernels leave to plain torch.
    "test_token_exact.py::test_64_requests_are_token_exact[odd-sizes-False-64-True]",
    # Each head of queries and keys normed.
    "test_token_exact.py::test_64_requests_are_token_exact[qwen3-True-16-True]",
    # Penalties and biases of logits; a grammar's mask; draws under every mask.
    "test_constrained_sampling.py::test_greedy_tokens_are_those_of_the_definitions[64-512]",
    "sampling/test_grammar_bitmask.py::test_greedy_and_random_rows_obey_and_their_neighbours_do_not_notice",
    "test_seeded_sampling.py::test_same_tokens_among_31_others[True-64]",
]
INVARIANT = [
    f"test_batch_invariance.py::test_alone_in_a_batch_in_chunks_and_after_preemption[{quantization}-auto]"
    for quantization in (None, "int8")
]
"""Of bfloat16 and int8; plain torch promises no such thing."""

RUN_PYTEST = """
    import json, sys
    import pytest
    from quire_kernels import cpu

    class Passed:
        number = 0

        def pytest_runtest_logreport(self, report):
            self.number += report.when == "call" and report.passed

    passed = Passed()
    code = pytest.main(sys.argv[1:], plugins=[passed])
    print()
    print(json.dumps([code, passed.number, cpu.status().instruction_set, cpu.status().reason]))
"""


def has_kernels(name: str) -> bool:
    """Whether the library is there, and the processor has what it needs for these kernels."""
    status = cpu.status()
    if status.handle is None:
        return False
    found = bool(status.handle.quire_select(name.encode()))
    status.handle.quire_select(str(status.instruction_set).encode())  # as before, for the whole process
    return found


@pytest.fixture(scope="module")
def runs(
    made: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[int, "subprocess.Popen[bytes]"]]]:
    """Number of tests and process for each kind of kernels. All at once, each in one thread, with what is `made`."""
    started = {}
    with contextlib.ExitStack() as stack:
        for kernels in ("avx512", "avx2", "torch"):
            if kernels == cpu.status().instruction_set or (kernels != "torch" and not has_kernels(kernels)):
                continue  # what the machine chooses by itself has all of the engine's tests
            names = EXACT if kernels == "torch" else EXACT + INVARIANT
            tests = [str(ENGINE_TESTS / name) for name in names]
            folder = tmp_path_factory.mktemp(kernels)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(cpu.KERNELS_VARIABLE, kernels)
                patch.setenv("OMP_NUM_THREADS", "1")
                arguments = ("-q", "-p", "no:cacheprovider", f"--basetemp={folder}", *tests)
                process = start_python(RUN_PYTEST, *arguments)
            stack.enter_context(ended([process]))
            started[kernels] = len(tests), process
        yield started


@pytest.mark.parametrize("kernels", ["avx512", "avx2", "torch"])
def test_engine_on_forced_kernels(kernels: str, runs: dict[str, tuple[int, "subprocess.Popen[bytes]"]]) -> None:
    if kernels not in runs:
        pytest.skip(f"{kernels}: chosen without force, or not there; {cpu.status().reason}")
    num_tests, process = runs[kernels]
    output = process.communicate()[0].decode()
    code, num_passed, instruction_set, reason = json.loads(output.splitlines()[-1])
    assert (code, num_passed) == (pytest.ExitCode.OK, num_tests), output
    assert instruction_set == (None if kernels == "torch" else kernels), reason
