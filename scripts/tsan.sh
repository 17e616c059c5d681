#!/usr/bin/env bash
# tsan.sh PYTHON: builds the engine with ThreadSanitizer, and runs the tests of threads
# with it. PYTHON belongs to an environment with hostcall's requirements. It is a
# free-threaded Python that was itself built by clang with --with-thread-sanitizer, since
# the sanitizer has to see Python's locks. If the sanitizer finds its addresses in use,
# run it with `setarch -R`.
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
export TSAN_OPTIONS="report_bugs=0" # of Python alone, while the engine is built
failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake=$("$python" -c 'import cmake, os; print(os.path.join(cmake.CMAKE_BIN_DIR, "cmake"))')
mkdir -p "$work/src"
cp -rL src/hostcall "$work/src/"
"$cmake" -S . -B "$work/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_COMPILER="$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CXX"))')" \
  -DCMAKE_CXX_FLAGS="-fsanitize=thread -fno-omit-frame-pointer -g -O1" \
  -DPython_EXECUTABLE="$python" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$work/cmake.log" ||
  { cat "$work/cmake.log"; exit 1; }
"$cmake" --build "$work/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
cp "$work"/build/_native*.so "$work/src/hostcall/"
# jaxlib and NumPy are not instrumented: what passes between threads through their own
# locks looks like a race, so accesses in them are left out.
cat >"$work/suppressions" <<'SUPPRESSIONS'
called_from_lib:libjax_common.so
called_from_lib:_multiarray_umath
SUPPRESSIONS
TSAN_OPTIONS="log_path=$work/report suppressions=$work/suppressions ignore_noninstrumented_modules=1 exitcode=0" \
  PYTHONPATH="$work/src" \
  "$python" -m pytest -q -p no:cacheprovider tests/runtime/test_threads.py || failed=1
# Races that Python and jaxlib have among themselves are theirs.
if ours=$(grep -l "_native" "$work"/report* 2>/dev/null); then
  cat $ours
  exit 1
fi
echo "no race in the engine; reports of others: $(ls "$work"/report* 2>/dev/null | wc -l)"
exit "$failed"
