"""Equations of calls and taps as JSON, for programs that leave the process.

The function goes by a name: that of `hc.register`, or, for the callables that hostcall
itself makes (a HostFunction's rules, the printer of `hc.print`, an object's methods), a
kind and what the kind needs. All else is written down by value.

A text comes from a file that may say anything. Options are checked as `hc.call` and
`hc.tap` check them, and the numbers and sizes of operands as their primitives make
them. What the checks refuse is `Malformed`. (The engine compares the bytes of XLA's
buffers once more.)
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from hostcall import _jax
from hostcall._core import portable, registry
from hostcall._core.callback import Callback, Policy
from hostcall._core.coroutines import is_coroutine_function
from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_function, own, why_here
from hostcall._core.portable import AVALS, Malformed, NotPortable
from hostcall._core.source import Place
from hostcall._core.spec import Results, Static, Template
from hostcall._engine import options
from hostcall._engine.params.call import CallParams
from hostcall._engine.params.feed import FeedParams
from hostcall._engine.params.tap import TapParams

EQUATIONS: dict[str, type] = {"call": CallParams, "tap": TapParams, "feed": FeedParams}

# Options that a text says elsewhere or not at all: the function (its policy is that of
# what is registered where the program is loaded), or whoever lowers the program, knows
# them better. `keep` is hc.watch's, whose programs don't travel.
_ELSEWHERE = {
    *("callback", "avals", "sharding", "vmap_method", "devices", "device", "keep"),
    *("fn", "template", "results", "fills", "policy", "traced", "place"),
}


@functools.cache
def options_of(cls: type) -> dict[str, Any]:
    """The options that travel, of an equation or a `Callback`, and their types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.name not in _ELSEWHERE}


# What the text of an equation says, and the types.
_TEXT = {
    "hostcall": int,
    "equation": Literal["call", "tap", "feed"],
    "function": tuple[str, Any],
    "operands": AVALS,
    "template": Template,
    "results": Results,
    "fills": tuple[bytes | None, ...],
    "avals": AVALS,
    "params": Any,
    "callback": Any,
    "parallel": bool,
    "linked": bool,
    "only": tuple[int, ...],
    "team": tuple[Literal["ONCE", "EACH"], int, int | None] | None,
    "mesh": tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None,
    "traced": Any,
    "place": tuple[str, int, str] | None,
}

# What neither the types say nor the tables of options, of values other than None.
_MORE: dict[str, Callable[[Any], bool]] = {
    "arrays": lambda value: value != "cuda",
    "levels": lambda value: value >= 0,
    "every": lambda value: value < 2**31,
    "only": lambda value: all(-1 <= ordinal < 2**31 for ordinal in value),
    "team": lambda value: 0 < value[1] < 2**20 and (value[2] or 0) >= 0,
    "mesh": lambda value: (
        min(value[1], default=1) > 0 and min(value[2], default=0) >= 0
    ),
    "place": lambda value: value[1] >= 0,
}

# hostcall's own callables say their kind in `travels_as`. The module that knows how
# a kind travels is imported when the kind is met: a process that loads a program may
# not have needed it so far. It has two functions:
#   tell: (callable, whether the program is exported) -> JSON. Raises NotPortable.
#   read: JSON -> (the callable, fields of its `Callback` that don't travel). It also
#     checks the JSON, which may say anything.
_HOMES = {
    "print": "hostcall._api.print",
    "object": "hostcall._api.object.portable",
    "host": "hostcall._host_function.portable",
}


def _home(kind: str) -> Any:
    if kind not in _HOMES:
        raise Malformed(f"a function of kind {kind!r}")
    return importlib.import_module(_HOMES[kind])


_NAMES = {made: name for name, made in EQUATIONS.items()}


# --- Telling ------------------------------------------------------------------------


def tell(params: Any, operands: Sequence[Any], *, exported: bool) -> dict[str, Any]:
    """An equation as JSON.

    Args:
        params: its parameters.
        operands: their avals.
        exported: whether the program is exported. Otherwise the text also decides
            whether JAX's compilation cache finds it, so it has nothing that changes
            from run to run or when a line is moved.

    Raises NotPortable.
    """
    name, callback = _NAMES.get(type(params)), params.callback
    if name is None:
        raise NotPortable(
            "it is a buffer callback or stands for one of JAX's own callbacks, whose"
            " options name things of this process. Use hc.call, hc.tap or hc.host"
        )
    if params.devices:
        raise NotPortable("it is a feed with sharding=, which names devices")
    traced = None if callback.traced is None else _jax.tell_traced(callback.traced)
    if callback.traced is not None and traced is None:
        raise NotPortable(
            "it was traced under a setting of JAX that has no text, of"
            f" {', '.join(name for name, _ in callback.traced.values)}. Set it for"
            " the whole process (jax.config.update) where the program is loaded"
        )
    place = callback.place
    line = [os.path.basename(place.file), place.line, place.function]
    return {
        "equation": name,
        "function": _tell_function(callback, exported),
        "operands": [*map(portable.tell_aval, operands)],
        "avals": [*map(portable.tell_aval, params.avals)],
        **portable.tell_record(callback, ("template", "results", "fills")),
        "params": portable.tell_record(params, options_of(EQUATIONS[name])),
        "callback": portable.tell_record(callback, options_of(Callback)),
        "parallel": params.vmap_method == "parallel",
        "traced": traced,
        "place": line if exported else None,
    }


def _tell_function(callback: Callback, exported: bool) -> Any:
    function = callback.function
    mine = own(function)
    kind = "" if mine is None else mine.travels_as
    if kind:
        return [kind, _home(kind).tell(function, exported)]
    policy, owner = callback.policy, callback.policy.owner
    if owner is not None:  # else its executor has a form of the function
        function = owner if registry.name_of_held(owner) else owner.fn
    name = name_of(
        function,
        "it has no name in other processes. Give it one where it is defined, for"
        f" example @hc.register({_suggested(callback)!r}, version=1), and in every"
        " process that loads the program",
    )
    if (policy != Policy() or policy.cache) and registry.find(*name) is not owner:
        raise NotPortable(
            "it is run in a way (timeout=, executor= or the like) that its hc.host"
            f" function says, while {registry.Name(*name)} is another one. Register the"
            " hc.host function: hc.register(name, version=1)(hc.host(fn, ...))"
        )
    return ["registered", name]


def name_of(held: Any, remedy: str, code: Any = None) -> list[Any]:
    """The registered name of what a program holds, for `registry.find`.

    Raises NotPortable with why it has none. Callables that hostcall makes say why they
    stay: users can't name them. `code` is such a callable in it.
    """
    name = registry.name_of_held(held)
    if name is None:
        why = why_here(held if code is None else code) or registry.why_nameless(held)
        raise NotPortable(why or remedy)
    return list(name)


def _suggested(callback: Callback) -> str:
    last = callback.name.rpartition(".")[2]
    return f"my_package.{last if last.isidentifier() else 'function'}"


def names_in(told: Any) -> list[registry.Name]:
    """The registered names that an equation needs."""
    kind, more = told["function"]
    named = more if kind == "registered" else more.get("registered")
    return [registry.Name(*named)] if named else []


# --- Reading ------------------------------------------------------------------------


def read(told: Any) -> tuple[Any, dict[str, Any]]:
    """(the parameters of an equation without symbolic sizes, what else its text says).

    Raises RegistryError if its function is not registered here, or lacks what is called
    of it; what reading a tree or a text that lacks a part raises; Malformed.
    """
    found = _parts(told)
    kind, more = found["function"]
    read_function = _registered if kind == "registered" else _home(kind).read
    function, extra = read_function(more)
    policy = extra.get("policy", Policy())
    if found["equation"] == "tap" and policy.owner is not None:
        # A tap calls what `hc.host` made, which is run as it says by itself.
        function, extra, policy = policy.owner, {}, Policy()
    _check_policy(found, function, policy)
    traced = None
    if found["traced"] is not None:
        traced = _jax.read_traced(found["traced"])
        if traced is None:
            raise Malformed(f"the settings of JAX {found['traced']!r}")
    callback = Callback(
        fn=Static(function),
        **{part: found[part] for part in ("template", "results", "fills")},
        place=Place(*(found["place"] or ("a loaded program", 0, "?"))),
        traced=traced,
        **found["callback"],
        **extra,
    )
    cls, plain = EQUATIONS[found["equation"]], found["params"]
    if cls is not TapParams:
        plain |= {
            "avals": found["avals"],
            "sharding": None,
            "vmap_method": "parallel" if found["parallel"] else "sequential",
        }
    return cls(callback=callback, **plain), found


def _registered(name: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """A registered function, and the policy of a HostFunction."""
    thing = registry.find(*name)
    if not is_function(thing):
        return registry.held_of(thing), {}
    return thing.fn, {"policy": Policy.of(thing.options, thing)}


def _check_policy(found: dict[str, Any], function: Any, policy: Policy) -> None:
    """Refuses an equation that does not go with how its function is run here."""
    ours = {name: getattr(policy, name) for name in ("timeout", "coalesce", "cache")}
    ours["awaits"] = is_coroutine_function(function)
    what = options.pair_refused({**_options_in(found), **ours})
    if what is not None:
        called = ", ".join(map(str, names_in(found)))
        raise LoadError(
            f"hostcall: what the program does with {called} does not go with what is"
            f" registered here: it has {what}"
        )


def _options_in(found: dict[str, Any]) -> dict[str, Any]:
    """The options of an equation, with a vmap_method that runs rows as it does."""
    whole = "expand_dims" if found["params"].get("levels") else None
    method = "parallel" if found["parallel"] else whole
    return {**found["callback"], **found["params"], "vmap_method": method}


def _parts(told: Any) -> dict[str, Any]:
    """What the text of an equation without symbolic sizes says.

    Raises Malformed, and what reading a tree or a text that lacks a part raises.
    """
    found = portable.read_record(told, _TEXT)
    kind = found["equation"]
    params = portable.read_record(found["params"], options_of(EQUATIONS[kind]))
    callback = portable.read_record(found["callback"], options_of(Callback))
    table = options.TAP if kind == "tap" else options.CALL
    checks = {option: row.fits for option, row in table.items()}
    for check in (checks, _MORE):
        for option, value in (found | params | callback).items():
            if value is not None and option in check and not check[option](value):
                raise Malformed(f"the option {option}={value!r}")
    found |= {"params": params, "callback": callback}
    what = options.pair_refused(_options_in(found))
    if what is not None:
        raise Malformed(what)
    _check_shapes(found, params, kind == "tap")
    return found


def _check_shapes(found: dict[str, Any], params: dict[str, Any], is_tap: bool) -> None:
    operands, grid = found["operands"], params["grid"]
    sizes = params["sizes"] if is_tap else ()
    for shape in (grid, sizes):
        portable.read_aval(["bool", *shape])
    _check_flags("batched", params["batched"], len(operands) if grid else 0, len(grid))
    levels = len(sizes) if is_tap else params["levels"]
    if is_tap:
        _check_flags("flags", params["flags"], levels, len(operands))
    masked, always = int(params["masked"]), int(is_tap and params["always"])
    if len(operands) < masked + always:
        raise Malformed(f"{len(operands)} operands, too few for its masks")
    if always and (operands[-1].dtype != bool or operands[-1].shape):
        raise Malformed(f"always= of {operands[-1]}")
    _check_grid(grid, params["batched"], operands[: len(operands) - always])
    if masked:
        mask = operands[0]
        whole = levels > 0 and mask.ndim > len(grid)  # `Equation.compresses`
        flags = params["batched"][0] if grid else []
        if mask.dtype != bool or (not whole and mask.ndim != sum(flags)):
            raise Malformed(f"where= of {mask}")
    arrays = len(found["template"].keys)
    if arrays != len(operands) - masked - always:
        raise Malformed(f"{len(operands)} operands for {arrays} arguments")
    if is_tap and found["avals"]:
        raise Malformed(f"results {found['avals']} of a tap")
    _check_results(found, 0 if is_tap else levels)


def _check_flags(what: str, flags: Any, rows: int, columns: int) -> None:
    if len(flags) != rows or any(len(each) != columns for each in flags):
        raise Malformed(f"{what}={flags!r}")


def _check_grid(grid: Any, batched: Any, operands: Sequence[Any]) -> None:
    """The leading sizes of each operand are those of the axes that it has."""
    if not grid:
        return
    for operand, flags in zip(operands, batched, strict=False):
        sizes = tuple(size for size, has in zip(grid, flags, strict=True) if has)
        if operand.shape[: len(sizes)] != sizes:
            raise Malformed(f"an operand {operand} in rows of {grid}")


def _check_results(found: dict[str, Any], levels: int) -> None:
    avals, fills, results = found["avals"], found["fills"], found["results"]
    wanted = [len(results.avals), len(results.keys), len(fills)]
    if wanted != [len(avals)] * 3:
        raise Malformed(f"{len(avals)} results with {len(fills)} fills for {wanted}")
    for fill, aval in zip(fills, avals, strict=True):
        if levels > aval.ndim:
            raise Malformed(f"levels={levels} of a result {aval}")
        if fill is None:
            continue
        item = aval.dtype.itemsize
        if len(fill) not in (item, item * math.prod(aval.shape[levels:])):
            raise Malformed(f"a fill of {len(fill)} bytes for {aval}")
        if len(fill) == item and math.prod(aval.shape) * item >= 2**48:
            raise Malformed(f"a fill for {aval}")
