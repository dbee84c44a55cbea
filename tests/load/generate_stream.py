"""Load on Triton's `generate_stream`: eight requests a second that come in bursts.

    python tests/load/generate_stream.py [OPTIONS]

Any option of `quire bench serve` may follow, and wins: --burstiness 1 --base-url http://HOST:8000 …
"""

import sys

from quire_cli.main import run

arguments = ["--backend", "generate-stream", "--model", "tinypy", "--request-rate", "8", "--burstiness", "0.25"]
sys.exit(run(["bench", "serve", *arguments, *sys.argv[1:]]))
