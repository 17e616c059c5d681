#!/usr/bin/env bash
# one_wheel.sh [PYTHON]: builds one wheel and tests it under the oldest and the newest
# supported jax. PYTHON has to be 3.12 or later, since the newest jax needs it.
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3.12}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/venv.sh "$python" "$work/build"
"$work/build/bin/pip" wheel --quiet --no-deps --wheel-dir "$work" .
wheel=$(ls "$work"/hostcall-*.whl)
echo "built $(basename "$wheel")"
for jax in "jax==0.10.2 jaxlib==0.10.2" "jax jaxlib"; do
  rm -rf "$work/env"
  scripts/venv.sh "$python" "$work/env"
  # shellcheck disable=SC2086
  "$work/env/bin/pip" install --quiet $jax "$wheel" pytest hypothesis
  "$work/env/bin/python" -c '
import jax, jaxlib
print("under jax", jax.__version__, "and jaxlib", jaxlib.__version__)'
  "$work/env/bin/python" -m pytest -q tests/call/test_call_jit.py tests/call/test_order.py
done
