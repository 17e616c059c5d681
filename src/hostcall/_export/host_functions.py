"""A HostFunction's code in programs that leave the process (_export/records.py).

The HostFunction goes by its registered name, and brings its rules, its pool and its
cache with it where the program is loaded. What the call site knows goes by value.
"""

from __future__ import annotations

from typing import Any

from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_function
from hostcall._core.options import Policy
from hostcall._core.source import Place, name_of, source_of
from hostcall._core.spec import Results, Template
from hostcall._export import codec, registry
from hostcall._export.codec import AVALS
from hostcall._export.records import name_of as name_of_registered
from hostcall._host_function.rules import RULES, Kind
from hostcall._host_function.site import CallSite
from hostcall._host_function.steps import Steps


def tell(steps: Steps, _: bool) -> dict[str, object]:
    function = steps.site.function
    name = name_of_registered(
        function,
        "it has no name in other processes. Register the hc.host function, not the"
        f' function in it: f = hc.register("my_package.{steps.site.name}", version=1)'
        "(f) (as a decorator above its @hc.host), in every process that loads the"
        " program",
        function.fn,
    )
    return {
        "registered": name,
        **codec.tell_record(steps, _STEPS),
        **codec.tell_record(steps.site, _SITE),
    }


# What travels of `Steps` and of their `CallSite`.
_STEPS = {"kind": Kind, "avals": AVALS, "nz": tuple[bool, ...], "take": bool}
_SITE = {
    "template": Template,
    "in_avals": AVALS,
    "results": Results,
    "nondiff": tuple[int, ...],
    "fills": tuple[bytes | None, ...] | None,
}
_TEXT = {"registered": tuple[str, int], **_STEPS, **_SITE}


def read(told: object) -> tuple[Steps, Policy]:
    found = codec.read_record(told, _TEXT)
    function = _function(found)
    place = Place("a loaded program", 0, function.__name__)
    site = CallSite(function, **{part: found[part] for part in _SITE}, place=place)
    steps = Steps(site, **{part: found[part] for part in _STEPS})
    return steps, Policy.of(steps.options(), function)


def _function(found: dict[str, Any]) -> Any:
    """The HostFunction that is registered here.

    Raises Malformed, or LoadError if it lacks what the program calls.
    """
    name, kind = registry.Name(*found["registered"]), found["kind"]
    function = registry.find(*name)
    if not is_function(function):
        raise LoadError(
            f"hostcall: the program calls {name} as a hc.host function, and here"
            f" {name_of(function)} ({source_of(function)}) is registered, which is a"
            " plain function. Register the result of hc.host"
        )
    needs, _ = RULES[kind]
    if needs and getattr(function.rules, needs) is None:
        raise LoadError(
            f"hostcall: the program calls the {kind} rule of {name}, and what is"
            f" registered here has no def{needs}. Give it the rules that it had where"
            " the program was exported, or count its version= up"
        )
    return function
