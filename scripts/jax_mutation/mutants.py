"""What becomes of hostcall under a JAX that nobody has seen: `make jax-mutation`.

    mutants.py              all mutants; writes docs/design/jax_boundary.md
    mutants.py --only NAME  those of which NAME is a part, printed
    mutants.py --sample N   N of them, chosen by the date; exits with 1 if one is wrong

For each private name of the tables (src/hostcall/_jax/needs.py and patches.py) a child
process changes JAX before it imports hostcall, and runs the programs of programs.py:

    removed     the name is not there
    signature   a function takes other arguments
    uncalled    JAX has the function that hostcall replaces, and never calls it

The change is made where hostcall looks, not in JAX, which goes on to use its own names:
hostcall imports a module that forwards to JAX's, but for that one name. Each program
must be right, or refused with the code hc-jax; or the import raises an ImportError that
says why. A wrong value, a lost or a second effect, another error, and a hang are wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib
import importlib.util
import io
import json
import os
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def tables() -> tuple[Any, Any]:
    """The two tables, read without importing hostcall, which a mutant does later."""
    spec = importlib.util.find_spec("hostcall")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "_jax"
    before = {name: sys.modules.pop(name) for name in _NAMES if name in sys.modules}
    sys.modules.update({name: types.ModuleType(name) for name in _NAMES[:2]})
    try:
        return _read(folder, _NAMES[2]), _read(folder, _NAMES[3])
    finally:
        for name in _NAMES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


_NAMES = ("hostcall", "hostcall._jax", "hostcall._jax.needs", "hostcall._jax.patches")


def _read(folder: Path, name: str) -> Any:
    path = folder / f"{name.rpartition('.')[2]}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Methods that JAX calls by names which many classes have, or by none: no other JAX that
# still has these classes can be made by renaming them.
_ALWAYS_THERE = ("load", "__call__", "__init__", "block_until_ready")


def mutants() -> list[tuple[str, str, str]]:
    """(module, name, kind) of each; the part that it belongs to is in the tables."""
    needs, patches = tables()
    import jax

    here = tuple(int(x) for x in jax.__version__.split(".") if x.isdecimal())
    found = []
    for need in needs.NEEDS:
        since, until = (
            tuple(map(int, (text or default).split(".")))
            for text, default in ((need.since, "0"), (need.until, "9999"))
        )
        if not (since <= here and here[: len(until)] <= until):
            continue
        for name in need.names.split() or [""]:
            found.append((needs.MODULES[need.module], name, "removed"))
            if (need.module, name) in needs.CALLED:
                found.append((needs.MODULES[need.module], name, "signature"))
    for patch in patches.PATCHES:
        if patch.is_entry or patch.when.name == "FORK" or patch.name in _ALWAYS_THERE:
            continue
        found.append((patch.holder, patch.name, "removed"))
        if patch.takes:
            found.append((patch.holder, patch.name, "signature"))
        if patch.asked_in:
            found.append((patch.holder, patch.name, "uncalled"))
    for patch in patches.PATCHED:
        if patch.holder.startswith("jax._src") and not patch.is_entry:
            found.append((patch.holder, patch.name, "uncalled"))
    return list(dict.fromkeys(found))


# --- A JAX that is changed ------------------------------------------------------------


class _Forwarding(types.ModuleType):
    """JAX's module, but for one name."""

    def __init__(self, module: types.ModuleType, name: str, instead: Any) -> None:
        object.__setattr__(self, "_real", (module, name, instead))

    def __getattribute__(self, key: str) -> Any:
        if key == "__class__":
            return types.ModuleType
        module, name, instead = object.__getattribute__(self, "_real")
        if key == "__dict__":
            return {k: v for k, v in vars(module).items() if k != name}
        if key != name:
            return getattr(module, key)
        if instead is None:
            raise AttributeError(f"no {key} any more")
        return instead

    def __setattr__(self, key: str, value: Any) -> None:
        module, name, _ = object.__getattribute__(self, "_real")
        assert key != name, "a replacement of what is not there"
        setattr(module, key, value)


def _other_signature(*, another: object, than: object) -> None:
    raise AssertionError("a function with another signature was called")


def change(path: str, name: str, kind: str) -> Callable[[], None]:
    """Makes hostcall see another JAX. Returns what gives JAX its own modules back, once
    hostcall has looked: JAX imports from them too, where it first needs to.
    """
    import jax
    import jax.export  # noqa: F401

    module, _, inner = path.partition(":")
    if inner or kind == "uncalled":
        _change_in_place(module, inner, name, kind)
        return lambda: None
    for other in tables()[
        0
    ].MODULES.values():  # what JAX imports late, with the real one
        with contextlib.suppress(ImportError, AttributeError):
            _import(other)
    real = _import(module)
    instead = _other_signature if kind == "signature" else None
    outer, _, last = module.rpartition(".")
    fake: Any = _Forwarding(real, name, instead) if name else None
    sys.modules[module] = fake  # None: importing it raises
    with contextlib.suppress(ImportError):
        parent = importlib.import_module(outer)
        if fake is not None:
            setattr(parent, last, fake)
        elif hasattr(parent, last):
            delattr(parent, last)

    def give_back() -> None:
        sys.modules[module] = real
        with contextlib.suppress(ImportError):
            setattr(importlib.import_module(outer), last, real)

    return give_back


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        outer, _, last = module.rpartition(".")
        return getattr(importlib.import_module(outer), last)


# Names that other modules of JAX have for other things.
_OF_ONE_MODULE = ("pe", "bind")


def _change_in_place(module: str, inner: str, name: str, kind: str) -> None:
    """Changes JAX itself so that JAX does without the function."""
    home = importlib.import_module(module)
    holder = getattr(home, inner) if inner else home
    plain = getattr(holder, name)
    other = f"another_{name}"

    def renamed(code: types.CodeType) -> types.CodeType:
        names = tuple(other if n == name else n for n in code.co_names)
        consts = tuple(
            renamed(c) if isinstance(c, types.CodeType) else c for c in code.co_consts
        )
        return code.replace(co_names=names, co_consts=consts)

    # JAX calls the function by another name from now on.
    for n, m in list(sys.modules.items()):
        if not n.startswith("jax._src") or (name in _OF_ONE_MODULE and m is not home):
            continue
        for function in _functions(m):
            if name in _names(function.__code__):
                function.__code__ = renamed(function.__code__)
    if name == "bind":  # the other primitives of the module are bound by it too
        setattr(type(holder), other, getattr(type(holder), name))
        return
    raw = vars(holder).get(name, plain)
    setattr(holder, other, raw)
    if kind == "removed" and name in vars(holder):
        delattr(holder, name)
    elif kind == "signature":
        setattr(holder, name, _other_signature)


def _functions(module: types.ModuleType) -> list[types.FunctionType]:
    """The functions of a module, and the methods of its classes."""
    things = list(vars(module).values())
    for each in list(things):
        things += vars(each).values() if isinstance(each, type) else ()
    plain = [getattr(each, "__func__", each) for each in things]
    plain = [getattr(each, "__wrapped__", each) for each in plain]
    return [each for each in plain if isinstance(each, types.FunctionType)]


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*inner)


# --- One mutant -----------------------------------------------------------------------


def outcomes(mutant: tuple[str, str, str]) -> dict[str, str]:
    """What each program did, in a child process; under "" what became of all."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        found: dict[str, str] = {}
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                found = _in_child(mutant)
        except BaseException as error:
            found[""] = f"WRONG {type(error).__name__}: {error}"[:300]
        finally:
            with os.fdopen(write, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"": "WRONG it hung or crashed"}


def _in_child(mutant: tuple[str, str, str]) -> dict[str, str]:
    import faulthandler
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_SECONDS)  # a hang ends the child, which has said nothing then
    faulthandler.disable()
    give_back = change(*mutant)
    try:
        sys.path.insert(0, str(Path(__file__).parent))
        programs = importlib.import_module("programs")
        door = importlib.import_module("hostcall._jax.door")
        for part in importlib.import_module("hostcall._jax.needs").Part:
            door.missing(part)
        if mutant[0] not in {door.MODULES[alias] for alias in door._LATE}:
            give_back()
    except ImportError as error:
        if "hostcall is known to work with jax" in str(error):
            return {"": "no import"}
        raise
    return {name: programs.run(name) for name in programs.PROGRAMS}


def summary(found: dict[str, str]) -> str:
    """An outcome in a cell of the table."""
    if found.get("") == "no import":
        return "`import hostcall` says what to install"
    wrong = {name: text for name, text in found.items() if text.startswith("WRONG")}
    if wrong:
        return "**wrong**: " + ", ".join(name or text for name, text in wrong.items())
    refused = [name for name, text in found.items() if text == "refused"]
    if not refused:
        return "all right"
    right = len(found) - len(refused)
    if right == 0:
        return "all refused"
    return f"{right} right, refused: {', '.join(f'`{n}`' for n in refused)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a file of outcomes to go on from")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in ".".join(m)]
    if options.sample:
        day = datetime.date.today().isoformat()
        chosen = random.Random(day).sample(chosen, min(options.sample, len(chosen)))
    kept: dict[str, dict[str, str]] = {}
    if options.keep and options.keep.exists():
        kept = json.loads(options.keep.read_text())
    wrong = 0
    for mutant in chosen:
        key = " ".join(mutant)
        if key not in kept:
            kept[key] = outcomes(mutant)
            if options.keep:
                options.keep.write_text(json.dumps(kept))
        text = summary(kept[key])
        wrong += "**wrong**" in text
        print(*mutant, "|", text, flush=True)
        for name, said in kept[key].items():
            if said.startswith("WRONG"):
                print("    ", name, said, flush=True)
    counts = collections.Counter(summary(kept[" ".join(m)])[:12] for m in chosen)
    print(dict(counts))
    if not options.only and not options.sample:
        page = importlib.import_module("page")
        page.write({key: summary(found) for key, found in kept.items()})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)
        sys.exit(main())
