"""The main module of what `support.processes.start_forked` starts."""

import json
import sys

source, *sys.argv[1:] = json.loads(sys.stdin.buffer.readline())
exec(source, {"__name__": "__main__"})
