"""The host calls in an exported program, which somebody else may have written.

A program that leaves the process holds each call as a text (_export/texts.py). The
numbers by which programs that are lowered here find their plans mean nothing in another
process, or worse, a function of its own. So a file may hold none of them, no handler
that `hc.export` never writes, and no text that describes other arrays than the program
passes.
"""

from __future__ import annotations

import functools
import re

import jax

from hostcall import _jax
from hostcall._core.errors import LoadError
from hostcall._engine import targets
from hostcall._export.texts import Call

# The handlers that an exported program may name.
TARGETS = (targets.TARGET, targets.TAP_TARGET, targets.LINK_TARGET)
_OURS = "hostcall_"
# JAX's own callbacks go by numbers too, and jax.export never writes them.
_JAXS_CALLBACK = re.compile(r"xla_\w*python\w*callback")
_TOKEN = "!stablehlo.token"
_NUMBER = _jax.type_text("int32", ())


def calls_in(exported: jax.export.Exported, vjp_order: int) -> list[Call]:
    """All calls, in the program and in the programs of its derivatives. Those of one
    text are one object.

    Raises LoadError if one of them is not as `hc.export` writes it, and RegistryError
    if this process lacks its function.
    """
    # Equal texts are read once, and are one object, so that the manifest can count.
    read = functools.cache(Call.of)
    calls = []
    for program in (exported, *derivatives(exported, vjp_order)):
        for operation in _jax.custom_calls(program):
            text = _text_of(operation)
            if text is not None:
                call = read(text)
                _check(operation, call, program.nr_devices)
                calls.append(call)
    return calls


def derivatives(
    exported: jax.export.Exported, most: int | None = None
) -> list[jax.export.Exported]:
    """The programs of its derivatives. One that was read from a file has an end."""
    programs: list[jax.export.Exported] = []
    while len(programs) != most and exported.has_vjp():
        exported = exported.vjp()
        programs.append(exported)
    return programs


def _text_of(call: _jax.CustomCall) -> str | None:
    """The text of a call, if it is one of hostcall's and no link."""
    # XLA has other operations that call a handler by its name, which would pass what is
    # checked here; `hc.export` writes none of them.
    is_plain = call.operation == "stablehlo.custom_call"
    by_detour = not is_plain or call.target.startswith("mhlo.custom_call")
    if by_detour or _JAXS_CALLBACK.fullmatch(call.target):
        raise _refused(f"a {call.operation} of {call.target!r}")
    if not call.target.startswith(_OURS):
        return None
    if call.target not in TARGETS:
        raise _refused(f"a call of {call.target!r}")
    if call.odd:
        raise _refused(f"a call of {call.target!r} with its own {', '.join(call.odd)}")
    if call.target == targets.LINK_TARGET:
        # It only orders two calls, by a number that it passes on.
        _check_arrays(
            call,
            operands=[_NUMBER],
            results=[_NUMBER],
            has_token=True,
            description="a link between two calls",
        )
        if call.config or call.aliases:
            raise _refused(f"a link with the attributes {sorted(call.config)}")
        return None
    text = call.config.get(targets.TEXT)
    if text is None or len(call.config) > 1:
        raise _refused(
            f"a call of {call.target!r} with the attributes {sorted(call.config)},"
            f" where only the text {targets.TEXT!r} should be"
        )
    return text


def _check(operation: _jax.CustomCall, call: Call, devices: int) -> None:
    """Compares a custom call with what its text says."""
    record = call.record
    params = call.params
    description = f"a {record.equation} of {record.function[0]!r}"
    if operation.target != params.target:
        raise _refused(f"{description} that names {operation.target!r}")
    if operation.aliases and not params.through:
        raise _refused(f"{description} whose results take the memory of its operands")
    if record.team is not None:
        _, team_size, _ = record.team
        # A team waits until each of its devices has come.
        if team_size != devices:
            raise _refused(
                f"{description} that {team_size} devices make together, and the"
                f" program runs on {devices}: they would wait for each other for ever"
            )
    has_effect = params.options.order != "pure"
    # XLA drops a call without side effects whose results nobody uses.
    if (params.keep_if_pure or has_effect) and not operation.has_side_effect:
        raise _refused(f"{description} that XLA may drop")
    operands, results = call.buffers()
    _check_arrays(
        operation,
        operands=[_jax.type_text(dtype, sizes) for dtype, *sizes in operands],
        results=[_jax.type_text(dtype, sizes) for dtype, *sizes in results],
        has_token=has_effect and not record.linked,
        description=description,
    )


def _check_arrays(
    call: _jax.CustomCall,
    operands: list[str],
    results: list[str],
    has_token: bool,
    description: str,
) -> None:
    """Compares the types of arrays in the program with those of a description."""
    operand_types = call.operands
    if has_token:
        # An unordered call that is the first has no token before it.
        if operand_types[:1] == [_TOKEN]:
            operand_types = operand_types[1:]
        results = [_TOKEN, *results]
    if operand_types != operands or call.results != results:
        raise _refused(
            f"{description} that gets ({', '.join(call.operands)}) and returns"
            f" ({', '.join(call.results)}), and whose description says"
            f" ({', '.join(operands)}) and ({', '.join(results)})"
        )


def _refused(description: str) -> LoadError:
    return LoadError(
        f"hostcall: the exported program has {description}. hc.export writes no such"
        " call, so something else wrote the file or changed it. Export the program"
        " again"
    )
