"""Load over gRPC streams: a Poisson process of eight requests a second.

    python tests/load/grpc_streams.py [OPTIONS]

Any option of `quire bench serve` may follow, and wins: --request-rate 20 --base-url HOST:8001 --json …
"""

import sys

from quire_cli.main import run

sys.exit(run(["bench", "serve", "--backend", "grpc", "--model", "tinypy", "--request-rate", "8", *sys.argv[1:]]))
