"""Load on OpenAI's chat completions: eight users in a closed loop.

    python tests/load/openai_chat.py [OPTIONS]

Any option of `quire bench serve` may follow, and wins: --backend openai --base-url http://HOST:9000 …
"""

import sys

from quire_cli.main import run

arguments = ["--backend", "openai-chat", "--model", "tinypy", "--max-concurrency", "8"]
sys.exit(run(["bench", "serve", *arguments, *sys.argv[1:]]))
