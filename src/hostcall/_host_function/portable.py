"""A HostFunction's code in programs that leave the process (_engine/portable.py).

The HostFunction goes by its registered name, and brings its rules, its pool and its
cache with it where the program is loaded. What the call site knows goes by value. The
slope of an elementwise function with finite differences goes by that function's name.
"""

from __future__ import annotations

from typing import Any

from hostcall._core import portable, registry
from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_function
from hostcall._core.portable import AVALS, Malformed
from hostcall._core.source import Place, name_of, source_of
from hostcall._core.spec import Results, Template
from hostcall._engine.options import Policy
from hostcall._engine.portable import name_of as name_of_registered
from hostcall._host_function.differences import Diagonal
from hostcall._host_function.function_code import FunctionCode
from hostcall._host_function.rules import RULES, Kind
from hostcall._host_function.site import Site
from hostcall._host_function.trees import Trees


def tell(code: FunctionCode, _: bool) -> Any:
    function, trees = code.site.function, code.site.trees
    slope = None
    if isinstance(function.fn, Diagonal):
        slope = function.fn.position
        function = function.fn.differences.function
    name = name_of_registered(
        function,
        "it has no name in other processes. Register the hc.host function, not the"
        f' function in it: f = hc.register("my_package.{trees.name}", version=1)(f)'
        " (as a decorator above its @hc.host), in every process that loads the program",
        function.fn,
    )
    return {
        "registered": name,
        "slope": slope,
        **portable.tell_record(code, _CODE),
        **portable.tell_record(trees, _TREES),
    }


# What travels of a `FunctionCode` and of its `Trees`.
_CODE = {"kind": Kind, "avals": AVALS, "nz": tuple[bool, ...], "take": bool}
_TREES = {
    "name": str,
    "template": Template,
    "in_avals": AVALS,
    "results": Results,
    "nondiff": tuple[int, ...],
    "fills": tuple[bytes | None, ...] | None,
}
_TEXT = {"registered": tuple[str, int], "slope": int | None, **_CODE, **_TREES}


def read(told: Any) -> tuple[FunctionCode, Policy]:
    found = portable.read_record(told, _TEXT)
    function, slope = _function(found), found["slope"]
    trees = Trees(**{part: found[part] for part in _TREES})
    if slope is not None:
        (arguments, _) = trees.template.treedef.children()
        if slope not in range(len(arguments.children())):
            raise Malformed(f"the slope {slope!r}")
        function = function.differences.slope(slope)
    site = Site(function, trees, Place("a loaded program", 0, trees.name))
    code = FunctionCode(site, **{part: found[part] for part in _CODE})
    code.describe()
    return code, Policy.of(code.options(), function)


def _function(found: dict[str, Any]) -> Any:
    """The HostFunction that is registered here.

    Raises Malformed, or LoadError if it lacks what the program calls.
    """
    name, kind = registry.Name(*found["registered"]), found["kind"]
    if found["slope"] is not None and kind != "value":  # it is host code without rules
        raise Malformed(f"the rule {kind!r}")
    function = registry.find(*name)
    if not is_function(function):
        raise LoadError(
            f"hostcall: the program calls {name} as a hc.host function, and here"
            f" {name_of(function)} ({source_of(function)}) is registered, which is a"
            " plain function. Register the result of hc.host"
        )
    differences = function.differences
    if found["slope"] is not None and not (differences and differences.elementwise):
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
