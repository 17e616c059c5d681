#!/usr/bin/env bash
# venv.sh PYTHON FOLDER: makes an environment, or says what is missing for one. If
# PYTHON is empty, it takes a Python of at least 3.11 that has venv and C headers.
# venv.sh PYTHON: only says, by its exit status, whether such a Python is there.
set -u
wanted=$1
folder=${2:-}

usable() {
  "$1" - 2>/dev/null <<'PY'
import ensurepip, pathlib, sys, sysconfig, venv
header = pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h"
sys.exit(0 if sys.version_info >= (3, 11) and header.exists() else 1)
PY
}

if [ -n "$wanted" ]; then
  candidates=("$wanted")
else
  candidates=(python3 python3.15 python3.14 python3.13 python3.12 python3.11)
fi
for python in "${candidates[@]}"; do
  command -v "$python" >/dev/null 2>&1 || continue
  if usable "$python"; then
    [ -n "$folder" ] || exit 0
    "$python" -m venv "$folder" || exit 1
    exit 0
  fi
done
[ -n "$folder" ] || exit 1
cat >&2 <<EOF
hostcall needs Python 3.11 or later, with its venv module and C headers.
Looked for: ${candidates[*]}
On Debian or Ubuntu:  sudo apt-get install python3 python3-venv python3-dev
On Fedora:            sudo dnf install python3 python3-devel
Or name one:          make PYTHON=/path/to/python3.12 demo
EOF
exit 1
