#!/bin/bash
# Compiles native/ for machines that are not here: ports.sh PYTHON
#
# PYTHON has hostcall's build requirements, and the package ziglang, whose compiler has
# the C and C++ libraries of each target. Nothing is linked or run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
out=build/ports
# NumPy's headers say what the system has: macOS needs those of its own wheel.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
  --only-binary :all: --platform macosx_14_0_arm64 --target "$out/numpy" \
  "numpy==$("$python" -c 'import numpy; print(numpy.__version__)')"
includes=$("$python" - <<'END'
import pathlib, sysconfig
import jaxlib, nanobind

bind = pathlib.Path(nanobind.__file__).parent
folders = [pathlib.Path(jaxlib.__file__).parent / "include", bind / "include"]
folders += [bind / "ext" / "robin_map" / "include", sysconfig.get_path("include")]
print("-Inative", *(f"-isystem {folder}" for folder in folders))
END
)
linux_numpy=$("$python" -c 'import numpy; print(numpy.get_include())')
for target in aarch64-linux-gnu.2.28 aarch64-macos.11.0 x86_64-macos.11.0; do
  numpy=$linux_numpy
  [[ $target == *macos* ]] && numpy=$out/numpy/numpy/_core/include
  for source in native/*/*.cc; do
    # shellcheck disable=SC2086  # a list of flags
    "$python" -m ziglang c++ -target "$target" -std=c++17 -O1 -Wall -Wextra -Werror \
      $includes -isystem "$numpy" -c "$source" -o "$out/compiled.o"
  done
  echo "compiled for $target: $(ls native/*/*.cc | wc -l) sources"
done
