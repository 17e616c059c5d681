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
from hostcall._engine.options import POLICY
from hostcall._engine.params.equation import Policy
from hostcall._engine.portable import name_of as name_of_registered
from hostcall._host_function.differences import Diagonal
from hostcall._host_function.function_code import FunctionCode, Kind
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


def read(told: Any) -> tuple[FunctionCode, dict[str, Any]]:
    found = portable.read_record(told, _TEXT)
    name = registry.Name(*found["registered"])
    function, slope = registry.find(*name), found["slope"]
    trees = Trees(**{part: found[part] for part in _TREES})
    if slope is not None:
        (arguments, _) = trees.template.treedef.children()
        if slope not in range(len(arguments.children())):
            raise Malformed(f"the slope {slope!r}")
        function = _slope(function, slope, name)
    _check_rules(function, found["kind"], name)
    site = Site(function, trees, Place("a loaded program", 0, trees.name))
    code = FunctionCode(site, **{part: found[part] for part in _CODE})
    code.describe()
    options = code.options()
    policy = {option: options.get(option) for option in POLICY}  # bridges lack some
    return code, {"policy": Policy.of(owner=function, **policy)}


def _slope(function: Any, position: int, name: registry.Name) -> Any:
    differences = function.differences if is_function(function) else None
    if differences is None or not differences.elementwise:
        raise LoadError(
            f"hostcall: the program calls the finite difference of {name}, and what is"
            " registered here is no elementwise function with"
            " hc.derivatives.finite_difference. Give it what it had where the"
            " program was exported, or count its version= up"
        )
    return differences.slope(position)


def _check_rules(function: Any, kind: str, name: registry.Name) -> None:
    """Raises LoadError if what is registered here lacks the rule that is called."""
    rules = function.rules if is_function(function) else None
    if rules is None:
        raise LoadError(
            f"hostcall: the program calls {name} as a hc.host function, and here"
            f" {name_of(function)} ({source_of(function)}) is registered, which is a"
            " plain function. Register the result of hc.host"
        )
    needs = {"both": "jvp", "forward": "vjp", "backward": "vjp"}.get(kind, kind)
    if kind != "value" and getattr(rules, needs) is None:
        raise LoadError(
            f"hostcall: the program calls the {kind} rule of {name}, and what is"
            f" registered here has no def{needs}. Give it the rules that it had where"
            " the program was exported, or count its version= up"
        )
