"""Runs a program with every JAX callback on hostcall's engine (hc.patch_jax)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

# Runs in a new interpreter, since this one has imported JAX already: what the program
# sets before it imports JAX (JAX_PLATFORMS, XLA_FLAGS) must count.
_START = """
import _hostcall_autopatch, io, os, runpy, sys, types, zipfile
module, home, observed, program = sys.argv[1:5]
sys.argv = sys.argv[4:]
sys.path[0] = home
def run():
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    packed = program.endswith(".pyc") or zipfile.is_zipfile(program)
    if packed or os.path.isdir(program):
        runpy.run_path(program, run_name="__main__")
        return
    # As Python does, and run_path does not: `__file__` is an absolute path, since the
    # program may change its folder, and sys.argv[0] is what was typed.
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(program)
    sys.modules["__main__"] = main
    with io.open_code(main.__file__) as file:
        code = compile(file.read(), main.__file__, "exec")
    exec(code, vars(main))
if observed:
    from hostcall._cli.run import observe
    observe(run, observed)
else:
    run()
"""


_OBSERVED = {
    "nans": "end a program with an error at its first NaN or infinity",
    "progress": "show a bar for each loop that lasts",
}

_PLACES = {
    "only": "observe this file, package or function alone: train.py, optax, loss_fn",
    "ignore": "do not observe this file, package or function",
}


def observe(run: Callable[[], None], observed: str) -> None:
    """Runs a program in an `hc.observe` block.

    `observed` has its names and options, as JSON.
    """
    # Imported only in the new interpreter, after the program's settings are known.
    import hostcall as hc
    from hostcall._core.errors import ReplacesReport

    names, options = json.loads(observed)
    sink = None
    path = options.get("to")
    if path is not None:
        sinks = hc.tools.sinks
        make_sink = sinks.csv if path.endswith(".csv") else sinks.jsonl
        sink = options["to"] = make_sink(path)
    observation = hc.observe(*names, **options)
    try:
        with observation:
            run()
    except FloatingPointError as error:
        if not isinstance(error, ReplacesReport):
            raise  # the program's own
        print(_report(error), file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        if sink is not None:
            sink.close()


def _report(error: Exception) -> str:
    """The traceback of an error with the lines of the program alone."""
    from hostcall._jax.places import in_library

    user_frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        # What was compiled from a text, as the start above, has no file.
        is_file = os.path.exists(frame.filename)
        if is_file and in_library(frame.filename) is None:
            user_frames.append(frame)
    lines = "".join(traceback.format_list(user_frames))
    return f"Traceback (most recent call last):\n{lines}FloatingPointError: {error}"


SHORT = "run a program with its callbacks on the engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arrays",
        choices=["jax", "numpy"],
        default="jax",
        help="the arrays that callbacks get (default: jax)",
    )
    _add_observations(parser)
    parser.add_argument(
        "-m", dest="module", action="store_true", help="program is a module's name"
    )
    parser.add_argument("program", help="a script, or a module with -m")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, help="the program's own arguments"
    )


def _add_observations(parser: argparse.ArgumentParser) -> None:
    """The options by which the program runs in an `hc.observe` block."""
    for option, text in _OBSERVED.items():
        parser.add_argument(f"--{option}", action="store_true", help=text)
    parser.add_argument(
        "--values",
        action="append",
        default=[],
        metavar="NAME",
        help="print the values of a variable to stderr, such as loss or 'grad_*'",
    )
    parser.add_argument(
        "--to",
        metavar="FILE",
        help="write these values to a file of JSON lines, or of CSV if it ends so",
    )
    parser.add_argument(
        "--on-bad",
        choices=["raise", "report"],
        default="raise",
        help="with --nans: end the program (default), or go on and report each place",
    )
    parser.add_argument(
        "--no-infs", action="store_true", help="with --nans: look for NaNs alone"
    )
    for option, text in _PLACES.items():
        parser.add_argument(
            f"--{option}", action="append", default=[], metavar="PATTERN", help=text
        )


def main(options: argparse.Namespace) -> NoReturn:
    """Runs a script or a module as Python itself would, with JAX patched, and observed
    if that is asked for.
    """
    home = os.getcwd()
    module = "-m"
    if not options.module:
        if not os.path.exists(options.program):
            options.refuse(f"there is no file {options.program}")
        home = os.path.dirname(os.path.abspath(options.program))
        module = ""
    observed = _observed(options)
    start = [sys.executable, "-c", _START, module, home, observed]
    environment = {**os.environ, "HOSTCALL_PATCH": options.arrays}
    # The new interpreter takes the place of this process, and what is in its buffers
    # would be lost.
    sys.stdout.flush()
    os.execve(sys.executable, [*start, options.program, *options.rest], environment)


def _observed(options: argparse.Namespace) -> str:
    """What `observe` gets: names and options as JSON; "" if nothing is observed.

    Refuses options that need another one.
    """
    by_name = vars(options)
    chosen: dict[str, object] = {}
    for name in _OBSERVED:
        if by_name[name]:
            chosen[name] = True
    if options.nans:
        chosen["on_bad"] = options.on_bad
        chosen["infs"] = not options.no_infs
    elif options.no_infs or options.on_bad != "raise":
        options.refuse("--on-bad and --no-infs need --nans")
    if options.to is not None:
        if not options.values:
            options.refuse("--to needs the names of values: --values NAME")
        chosen["to"] = os.path.abspath(options.to)  # the program may change its folder
    observes = bool(chosen or options.values)
    for name in _PLACES:
        if by_name[name]:
            if not observes:
                options.refuse(
                    "--only and --ignore need --nans, --progress or --values"
                )
            chosen[name] = by_name[name]
    return json.dumps([options.values, chosen]) if observes else ""
