#!/usr/bin/env bash
# xla_cuda.sh PYTHON: gets XLA's CUDA runtime for that Python's jax, and prints the folder
# for PYTHONPATH. In the environment itself JAX would look for a GPU whenever it starts.
#
# Exits with 3 if there are no such packages for this jax, Python and system, or no index can
# be reached: pip's own words, which it prints, are the same for both. Any other failure is 1.
set -u
python=$1
version=$("$python" -c "import jax; print(jax.__version__)") || exit 1
folder=$PWD/build/xla-cuda-$version
if [ ! -d "$folder" ]; then
  mkdir -p build
  part=$(mktemp -d "$folder.XXXXXX") || exit 1
  trap 'rm -rf "$part" "$part.log"' EXIT
  if ! "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$part" \
    "jax-cuda12-pjrt==$version" "jax-cuda12-plugin==$version" >"$part.log" 2>&1; then
    cat "$part.log" >&2
    grep -q "No matching distribution found for jax-cuda12" "$part.log" && exit 3
    exit 1
  fi
  # NVIDIA's mathematical functions as code for LLVM (libdevice), which kernels of sin or pow
  # need. Without it such programs are not compiled, and their tests not judged.
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$part" \
    "nvidia-cuda-nvcc-cu12==12.*" >"$part.log" 2>&1 ||
    echo "xla_cuda.sh: no nvidia-cuda-nvcc-cu12: $(tail -1 "$part.log")" >&2
  # XLA looks for an assembler there first, and would hand the driver of tests/fakegpu machine
  # code, which nothing but a GPU can run.
  rm -rf "$part/nvidia/cuda_nvcc/bin"
  mv "$part" "$folder" || exit 1
fi
echo "$folder"
