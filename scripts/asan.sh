#!/usr/bin/env bash
# asan.sh PYTHON: builds the engine with AddressSanitizer and UBSan, and runs the tests
# of memory, dtypes, vmap, devices, taps, dispatch and failures with it.
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
work=$(mktemp -d)
trap 'cat "$work"/report* 2>/dev/null || true; rm -rf "$work"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check nanobind cmake
cmake=$("$python" -c 'import cmake, os; print(os.path.join(cmake.CMAKE_BIN_DIR, "cmake"))')
mkdir -p "$work/src"
cp -r src/hostcall "$work/src/"
rm -f "$work"/src/hostcall/_native*.so
# nanobind copies no bytes from nowhere where a class is called without arguments. Only
# its own files may: base/bytes.h is for ours.
echo "nonnull-attribute:nanobind" >"$work/suppressed"
flags="-fsanitize=address,undefined -fno-omit-frame-pointer -g -O1"
# Built without -DNDEBUG, so the engine's assertions are on.
"$cmake" -S . -B "$work/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" \
  -DPython_EXECUTABLE="$python" -DCMAKE_CXX_FLAGS="$flags" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$work/cmake.log" ||
  { cat "$work/cmake.log"; exit 1; }
"$cmake" --build "$work/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
cp "$work"/build/_native*.so "$work/src/hostcall/"
# Reports go to files, which are printed at the end. UBSan's that ends a process does
# not: --capture=sys keeps pytest from swallowing it.
report="log_path=$work/report"
# detect_leaks=0: CPython and XLA keep memory for the process's life; test_lifetime.py
# counts leaks instead. allow_user_segv_handler=1: XLA installs its own handlers for the
# signals that ASan would take. allocator_may_return_null=1: one test asks for more memory
# than there is, and expects a MemoryError. The test of resident memory ("grow_memory") is
# left out, since ASan keeps freed memory.
asan="$report:detect_leaks=0:allow_user_segv_handler=1:alloc_dealloc_mismatch=0"
asan="$asan:allocator_may_return_null=1"
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
  ASAN_OPTIONS="$asan" \
  UBSAN_OPTIONS="$report:halt_on_error=1:print_stacktrace=1:suppressions=$work/suppressed" \
  PYTHONPATH="$work/src" PYTHONMALLOC=malloc \
  "$python" -m pytest -q --capture=sys -p no:cacheprovider tests/call/test_memory.py tests/call/test_vmap.py \
  tests/call/test_where.py tests/call/test_dtypes.py tests/call/test_errors.py tests/call/test_sharding.py \
  tests/tap/test_tap.py tests/tap/test_tap_queue.py tests/compat/test_buffer_callback.py \
  tests/compat/test_buffer_views.py tests/compat/test_buffer_native.py tests/runtime/test_dispatch.py \
  tests/compat/test_drop_in.py tests/call/test_reraise.py -k "not grow_memory"
