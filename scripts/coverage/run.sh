#!/usr/bin/env bash
# run.sh PYTHON: measures what the suite covers, of Python (lines and branches, and by
# which test) and of C++ (lines), and prints a table by folder.
#
# PYTHON has hostcall built with --coverage in build/coverage (`make coverage`). The tests
# of a wing are run after each other, so that what they cover is kept if a later one is
# stopped. Left out: the repository's own tests but those of the demo, since their
# programs only call what others test.
set -u
cd "$(dirname "$0")/../.."
python=$(realpath -s "$1")
shift
wings=${*:-call host_function object tap compat feed export runtime tools bridge inside
  repo/test_demo.py}
data=$PWD/build/coverage-data
mkdir -p "$data"
export COVERAGE_PROCESS_START=$PWD/scripts/coverage/coveragerc
export PYTHONPATH=$PWD/scripts/coverage
for wing in $wings; do
  name=${wing//[\/.]/_}
  rm -f "$data/$name".*
  COVERAGE_DATA=$data/$name "$python" -m pytest -q -p no:cacheprovider -p covered_by \
    -n "${PROCESSES:-2}" "tests/$wing" >"$data/$name.log" 2>&1
  echo "$wing: $(tail -n 1 "$data/$name.log")"
done
make -s -C tests/native run KINDS=coverage
unset COVERAGE_PROCESS_START PYTHONPATH
export COVERAGE_DATA=$data/all
coverage() {
  "$python" -m coverage "$1" --rcfile=scripts/coverage/coveragerc "${@:2}"
}
find "$data" -name '*.pid*' -print0 | xargs -0 "$python" -m coverage combine \
  --rcfile=scripts/coverage/coveragerc --keep --quiet
coverage json --quiet -o "$data/python.json"
"$python" -m gcovr --root . --filter native/ --merge-mode-functions=separate \
  --gcov-ignore-errors=no_working_dir_found --exclude-throw-branches \
  --json-summary "$data/native.json" build/coverage build/native >/dev/null
"$python" scripts/coverage/table.py "$data/python.json" "$data/native.json"
