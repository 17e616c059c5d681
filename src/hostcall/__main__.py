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
    if arguments is None:
        arguments = sys.argv[1:]
    parser = _parser()
    if arguments:
        _refuse_unknown(arguments[0], parser)
    options = parser.parse_args(arguments)
    if "main" in options:  # a command
        return int(options.main(options))
    lines = machine.report()
    speed.report()
    return int("BROKEN" in "".join(lines))


def _parser() -> argparse.ArgumentParser:
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
        description, _, _ = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(name, help=module.SHORT, description=description)
        command.set_defaults(main=module.main, refuse=command.error)
        module.add_arguments(command)
    return parser


def _refuse_unknown(word: str, parser: argparse.ArgumentParser) -> None:
    """Ends the program if its first argument is no command, and no option either.

    argparse would do so too, but it lists the choices alone.
    """
    if word in _GONE:
        parser.error(f"there is no command {word!r} any more: {_GONE[word]}")
    if word.startswith("-") or word in _COMMANDS:
        return
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    parser.error(
        f"there is no command {word!r}.{hint} The commands are {', '.join(_COMMANDS)}"
    )


if __name__ == "__main__":
    sys.exit(main())
