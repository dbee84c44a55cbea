"""Runs real client libraries against a `quire serve` of SmolLM2-135M-Instruct and all-MiniLM-L6-v2, and prints a table.

    make clients                                all of them; installs them first
    make clients ARGS="litellm instructor"      some of them
    .venv/bin/python tests/clients/run.py --url http://127.0.0.1:9000 --model NAME      a server that runs already

Exit code 1: a check failed. What the server says it does not offer is no failure.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.real_models import minilm, smollm2  # noqa: E402
from support.serving import run_cli, serve  # noqa: E402

PACKAGES = HERE.parents[1] / ".venv" / "clients"
CLIENTS = {
    file.name.removeprefix("with_"): file
    for file in sorted(HERE.glob("with_*"))
    if file.suffix == ".py" or (PACKAGES / "node_modules").is_dir()  # else there was no npm
}
MODEL, EMBEDDER = "smollm2", "minilm"
TIMEOUT_S = 600


@contextmanager
def served() -> Iterator[str]:
    """The address of a gateway."""
    with tempfile.TemporaryDirectory() as folder:
        # Its chat template shows no form for calls, so the model could not be offered tools to choose from. Scores are
        # compared in float32.
        settings = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30, "tool_call_parser": "hermes",
                    "dtype": "float32"}  # fmt: skip
        words = [f"{name}={value}" for name, value in settings.items()]
        for path, name, own in ((smollm2(), MODEL, words), (minilm(), EMBEDDER, ["dtype=float32"])):
            added = run_cli("model", "add", str(path), *own, "--name", name, "--model-repository", folder)
            assert added.returncode == 0, added.stderr
        with serve("--model-repository", folder, "--openai", "--openai-port", "0") as server:
            yield f"http://{server.openai}"


def run(file: Path, url: str, model: str) -> Iterator[dict[str, str]]:
    """The results of one client; a crash or a timeout is one, too."""
    if file.suffix == ".mjs":
        for script in HERE.glob("*.mjs"):  # which finds its packages beside itself alone
            shutil.copy(script, PACKAGES)
        command = ["node", str(PACKAGES / file.name), url, model]
    else:
        command = [str(PACKAGES / "bin" / "python"), str(file), url, model, str(smollm2())]
    # No client reports to its authors, or asks them for prices.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=PACKAGES, env={**os.environ, **quiet}
        )
        output, problem = done.stdout, f"exit code {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, problem = (error.stdout or b"").decode(), f"not done after {TIMEOUT_S} s"
    yield from (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    if problem:
        yield {"check": "the whole run", "result": "failed", "note": " ".join(problem.split())}


def main() -> int:
    """Print each result as it comes, and the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--url", help="of a gateway that runs already")
    parser.add_argument("--model", default=MODEL)
    given = parser.parse_args()
    chosen = [
        name for name in CLIENTS if not given.clients or name in given.clients or Path(name).stem in given.clients
    ]
    if not chosen:
        parser.error(f"no such client; there are {', '.join(CLIENTS)}")
    rows = []
    with nullcontext(given.url) if given.url else served() as url:
        for name in chosen:
            found = {"package": name, "version": "not installed"}
            results: dict[str, list[str]] = {"passed": [], "failed": [], "not offered": []}
            for line in run(CLIENTS[name], url, given.model):
                if "package" in line:
                    found = line
                    continue
                results[line["result"]].append(line["check"])
                print(f"{found['package']:24} {line['check']:28} {line['result']:12} {line['note']}", flush=True)
            rows.append([found["package"], found["version"], *(", ".join(names) for names in results.values())])
    print("\n| client | version | passed | failed | not offered |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(any(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
