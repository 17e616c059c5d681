"""A HostFunction's code in programs that leave the process (_engine/portable.py).

The HostFunction goes by its registered name, and brings its rules, its pool and its
cache with it where the program is loaded. What the call site knows goes by value. The
slope of an elementwise function with finite differences goes by that function's name.
"""

from __future__ import annotations

from typing import Any

from hostcall._core import portable, registry
from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_function, why_here
from hostcall._core.portable import Malformed, NotPortable
from hostcall._core.source import Place, name_of, source_of
from hostcall._core.spec import Static
from hostcall._engine.portable import add_kind
from hostcall._host_function.differences import Diagonal
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.rules import RULES
from hostcall._host_function.site import Site
from hostcall._host_function.trees import Trees


def _tell(code: FunctionCode, _: bool) -> Any:
    function, trees = code.site.function, code.site.trees
    slope = None
    if isinstance(function.fn, Diagonal):
        slope = function.fn.position
        function = function.fn.differences.function
    name = registry.name_of_held(function)
    if name is None:
        raise NotPortable(
            why_here(function.fn)
            or registry.why_nameless(function)
            or "it has no name in other processes. Register the hc.host function, not"
            " the function in it:"
            f' f = hc.register("my_package.{trees.name}", version=1)(f)'
            " (as a decorator above its @hc.host), in every process that loads the"
            " program"
        )
    return {
        "registered": list(name),
        "slope": slope,
        "kind": code.kind,
        "avals": portable.tell_avals(code.avals),
        "nz": list(code.nz),
        "take": code.take,
        "name": trees.name,
        "template": portable.tell_template(trees.template),
        "in": portable.tell_avals(trees.in_avals),
        "results": portable.tell_results(trees.results),
        "nondiff": list(trees.nondiff),
        "fills": trees.fills and [portable.tell_bytes(fill) for fill in trees.fills],
    }


def _read(told: Any) -> tuple[FunctionCode, dict[str, Any]]:
    fills = told["fills"]
    trees = Trees(
        name=str(told["name"]),
        template=portable.read_template(told["template"]),
        in_avals=portable.read_avals(told["in"]),
        results=portable.read_results(told["results"]),
        nondiff=portable.read_plain(told["nondiff"]),
        fills=fills and tuple(map(portable.read_bytes, fills)),
    )
    function, slope = _check(told), told["slope"]
    if slope is not None:
        (arguments, _) = trees.template.treedef.children()
        if type(slope) is not int or slope not in range(len(arguments.children())):
            raise Malformed(f"the slope {slope!r}")
        function = function.differences.slope(slope)
    site = Site(function, trees, Place("a loaded program", 0, trees.name))
    code = FunctionCode(
        site,
        told["kind"],
        portable.read_avals(told["avals"]),
        tuple(map(bool, told["nz"])),
        bool(told["take"]),
    )
    code.describe()
    options = code.options()
    executor = options["executor"]
    return code, {
        "executor": None if executor is None else Static(executor),
        "cache": options.get("cache"),  # bridges' functions have none
    }


def _check(told: Any) -> Any:
    """The HostFunction that is registered here.

    Raises Malformed, or LoadError if it lacks what the program calls.
    """
    name, kind = registry.Name(*told["registered"]), told["kind"]
    # A slope is host code without rules.
    if kind not in RULES or (told["slope"] is not None and kind != "value"):
        raise Malformed(f"the rule {kind!r}")
    function = registry.find(*name)
    if not is_function(function):
        raise LoadError(
            f"hostcall: the program calls {name} as a hc.host function, and here"
            f" {name_of(function)} ({source_of(function)}) is registered, which is a"
            " plain function. Register the result of hc.host"
        )
    differences = function.differences
    if told["slope"] is not None and not (differences and differences.elementwise):
        raise LoadError(
            f"hostcall: the program calls the finite difference of {name}, and what is"
            " registered here is no elementwise function with"
            " hc.derivatives.finite_difference. Give it what it had where the"
            " program was exported, or count its version= up"
        )
    needs, _ = RULES[kind]
    if needs and getattr(function.rules, needs) is None:
        raise LoadError(
            f"hostcall: the program calls the {kind} rule of {name}, and what is"
            f" registered here has no def{needs}. Give it the rules that it had where"
            " the program was exported, or count its version= up"
        )
    return function


add_kind("host", _tell, _read, _check)
