"""`hostcall`, also `python -m hostcall`: reports what works here, and has commands."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

import hostcall as hc
from hostcall._cli import explain, machine, run, speed

_COMMANDS = {"run": run, "explain": explain}
# Commands that have gone, and what to type instead.
_GONE = {
    "costs": "python -m hostcall, without a command, times a call beside JAX's, and"
    " python -m benchmarks in a checkout times everything"
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; without one, prints the report. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    is_script = os.path.basename(sys.argv[0]) == "hostcall"
    parser = argparse.ArgumentParser(
        prog="hostcall" if is_script else "python -m hostcall",
        description="Without a command: reports what works on this machine, and what a"
        " call costs.",
    )
    parser.add_argument(
        "--version", action="version", version=f"hostcall {hc.__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SHORT,
            description=(module.__doc__ or "").partition("\n")[0],
        )
        command.set_defaults(main=module.main, refuse=command.error)
        module.add_arguments(command)
    if given and given[0] in _GONE:
        parser.error(f"there is no command {given[0]!r} any more: {_GONE[given[0]]}")
    if given and not given[0].startswith("-") and given[0] not in _COMMANDS:
        near = difflib.get_close_matches(given[0], _COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        parser.error(
            f"there is no command {given[0]!r}.{hint} The commands are"
            f" {', '.join(_COMMANDS)}"
        )
    options = parser.parse_args(given)
    if "main" in options:
        return int(options.main(options))
    found = machine.report()
    speed.report()
    return int("BROKEN" in "".join(found))


if __name__ == "__main__":
    sys.exit(main())
