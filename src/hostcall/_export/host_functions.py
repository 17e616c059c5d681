"""A HostFunction's code in programs that leave the process (_export/records.py).

The HostFunction goes by its registered name, and brings its rules and its pool with
it where the program is loaded. What the call site knows goes by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hostcall._core.codec import Json
from hostcall._core.errors import LoadError
from hostcall._core.host_code import is_function
from hostcall._core.options import Policy
from hostcall._core.registered import Name
from hostcall._core.source import Place, inspect_callable, name_of
from hostcall._export import records, registry
from hostcall._export.structures import CODEC
from hostcall._host_function.rule_call import RuleCall
from hostcall._host_function.rules import RULES, Kind
from hostcall._host_function.site import BoundHostCall


@dataclass(frozen=True)
class StepsRecord:
    """Host code of a HostFunction: its name, and what travels of its `BoundHostCall`
    and of its `RuleCall`; JSON, if it was read.
    """

    registered: tuple[str, int]
    site: Json
    steps: Json


def record_of(steps: RuleCall, _: bool) -> StepsRecord:
    site = steps.site
    name = records.name_of(
        site.function,
        remedy=(
            "it has no name in other processes. Register the hc.host function, not the"
            f' function in it: f = hc.register("my_package.{site.name}", version=1)'
            "(f) (as a decorator above its @hc.host), in every process that loads the"
            " program"
        ),
        code=site.function.fn,
    )
    return StepsRecord(name, site, steps)


def read(json: Json) -> tuple[RuleCall, Policy]:
    code: StepsRecord = CODEC.decode(json, StepsRecord, "host code")
    fields = CODEC.fields(code.steps, RuleCall)
    function = _function(Name(*code.registered), fields["kind"])
    # Errors of its rules name a line; that of the exporting process is not in the file.
    place = Place("a loaded program", 0, function.__name__)
    site = BoundHostCall(
        function, place=place, **CODEC.fields(code.site, BoundHostCall)
    )
    steps = RuleCall(site, **fields)
    return steps, steps.policy


def _function(name: Name, kind: Kind) -> Any:
    """The HostFunction that is registered here.

    Raises RegistryError, or LoadError if it lacks what the program calls.
    """
    function = registry.find(name.name, name.version)
    if not is_function(function):
        raise LoadError(
            f"hostcall: the program calls {name} as a hc.host function, and here"
            f" {name_of(function)} ({inspect_callable(function).source}) is"
            " registered, which is a plain function. Register the result of hc.host"
        )
    # A file may name a rule that the function had where it was exported.
    needs = RULES[kind].field
    if getattr(function.rules, needs) is None:
        raise LoadError(
            f"hostcall: the program calls the {kind} rule of {name}, and what is"
            f" registered here has no def{needs}. Give it the rules that it had where"
            " the program was exported, or count its version= up"
        )
    return function
