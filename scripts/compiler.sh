#!/usr/bin/env bash
# Checks that there is a C++17 compiler, and says how to get one if not. Each command that
# installs hostcall from its source begins with this: so it says what comes, since pip is
# quiet until it is done.
set -u
compiler=${CXX:-c++}
probe='#include <optional>
int main() { std::optional<int> x = 0; return *x; }'
if command -v "$compiler" >/dev/null 2>&1 &&
  printf '%s\n' "$probe" | "$compiler" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null; then
  echo "Compiling hostcall with $compiler and installing it and the packages it needs." \
    "The first time this takes about two minutes, and prints nothing until it is done."
  exit 0
fi
cat >&2 <<EOF
hostcall needs a C++17 compiler, and '$compiler' is not one.
On Debian or Ubuntu:  sudo apt-get install g++
On Fedora:            sudo dnf install gcc-c++
Or name one:          make CXX=/path/to/clang++ demo
EOF
exit 1
