#!/usr/bin/env bash
# Runs one stage on a GPU machine that has no network, in less than ten minutes:
#
#     tests/benchmarks/gpu_machine/run.sh tests|bench|server [ARGUMENTS]
#
#     tests     on one device: the kernels' numeric tests; the engine token for token as transformers in float32, and
#               in bf16 as without CUDA graphs and steps ahead; adapters; images; what a GPU's memory is divided into, and
#               given back; sleep. ARGUMENTS: these files instead, and pytest's options
#     bench     tests/benchmarks/gpu.py; ARGUMENTS go there (--only decode steps)
#     server    a whole tritonserver with a dummy of 1B under 64 gRPC streams; ARGUMENTS go to server.py beside this
#
# pack.py has packed .gpu/ before, elsewhere. Results are left in $OUT (build/gpu). Nothing is installed: the packages
# are unpacked into a temporary folder and, like ours, found by PYTHONPATH. PYTHON is the machine's (python3), LIMIT the
# seconds that the stage may take (580).
set -euo pipefail
cd "$(dirname "$0")/../../.."
stage=${1:-}
case $stage in
  tests | bench | server) shift ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
PYTHON=${PYTHON:-python3} OUT=${OUT:-build/gpu} LIMIT=${LIMIT:-580}
mkdir -p "$OUT"
packages=$(mktemp -d "${TMPDIR:-/tmp}/quire-gpu.XXXXXX")
trap 'rm -rf "$packages"' EXIT

unpack() {
  [ -f ".gpu/$1.tar.xz" ] || { echo "run.sh: there is no .gpu/$1.tar.xz; make it with gpu_machine/pack.py" >&2; exit 1; }
  mkdir "$packages/$1"
  "$PYTHON" -W ignore -m tarfile -e ".gpu/$1.tar.xz" "$packages/$1"
}

unpack site
PYTHONPATH=$packages/site:$(printf "$PWD/%s:" engine kernels backend monitoring deploy dashboard)$PWD/tests
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
"$PYTHON" -c '
import sys, torch, transformers, triton
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"{gpu}; Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}, "
      f"transformers {transformers.__version__}")
' | tee "$OUT/machine-$stage.txt"

case $stage in
  tests)
    # With a GPU, kernels are compiled, whatever the devices are called.
    if grep -q "^no GPU" "$OUT/machine-tests.txt"; then interpret=1; else interpret=0; fi
    files=(
      tests/unit/kernels/gpu
      tests/unit/engine/test_triton_kernels.py
      tests/unit/engine/test_token_exact.py
      tests/unit/engine/test_shutdown.py
      tests/unit/engine/test_sleep.py
      tests/unit/engine/adapters
      tests/unit/engine/encoders/test_pictures.py
      tests/unit/engine/worker/test_device.py
      tests/unit/engine/worker/test_cache_memory.py
      tests/unit/engine/worker/test_decode_graphs.py
      tests/unit/engine/worker/test_on_device.py
    )
    [ $# = 0 ] || files=("$@")
    export OMP_NUM_THREADS=1  # each of the workers takes a core
    TRITON_INTERPRET=$interpret timeout "$LIMIT" "$PYTHON" -m pytest -q -p no:cacheprovider -p no:benchmark --timeout 100 -n "${WORKERS:-8}" \
      "${files[@]}" 2>&1 | tee "$OUT/tests.log"
    ;;
  bench)
    timeout "$LIMIT" "$PYTHON" tests/benchmarks/gpu.py --output "$OUT/gpu.md" --json "$OUT/gpu.json" "$@" 2>&1 \
      | tee "$OUT/bench.log"
    ;;
  server)
    unpack server
    export PYTHONPATH=$packages/server:$PYTHONPATH
    timeout "$LIMIT" "$PYTHON" tests/benchmarks/gpu_machine/server.py --log "$OUT/server.log" "$@" 2>&1 \
      | tee "$OUT/server.txt"
    ;;
esac
