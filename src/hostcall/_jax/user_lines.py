"""Where the user wrote the equations of a program."""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import NamedTuple

import jax
import numpy as np

from hostcall._jax import types as _t
from hostcall._jax.door import api as _api
from hostcall._jax.door import source_info_util as _lines

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


class SourceLine(NamedTuple):
    """A frame of the user's: where it was while the equation was traced.

    Attributes:
        line, column, end_line, end_column: the expression that was evaluated.
        differentiates: the function of JAX that it called, if that makes the backward
            pass of what the frames inside have traced: "grad_f", "value_and_grad_f".
        calls: the function of JAX that it called, such as "scan"; "" if it called
            another function.
        inside: the frames inside it, JAX's too.
    """

    file: str
    function: str
    line: int
    column: int
    end_line: int
    end_column: int
    differentiates: str
    calls: str
    inside: tuple[Hashable, ...]


_API = _api.__file__
_DIFFERENTIATE = {"grad_f", "grad_f_aux", "value_and_grad_f"}
_WRAPPER = "reraise_with_filtered_traceback"  # around JAX's public functions
_TRACES = {"trace_to_jaxpr", "trace_to_jaxpr_dynamic"}


def lines_of(eqn: _t.JaxprEquation) -> tuple[SourceLine, ...]:
    """The user's frames in which an equation was traced, the innermost first.

    Those around the jaxpr that it is in are left out.
    """
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ()
    user_frames = []
    differentiates = ""
    calls = ""
    inside: list[Hashable] = []
    for code, at in zip(*traceback.raw_frames(), strict=True):
        if code.co_filename.startswith(_JAX):
            if code.co_name in _TRACES:  # the frames behind it are around the jaxpr
                break
            # It belongs to the user's frame that comes next, which has called it.
            if code.co_name in _DIFFERENTIATE:
                differentiates = code.co_name
            elif code.co_name == "vjp" and code.co_filename == _API:
                differentiates = "vjp"
            if code.co_name != _WRAPPER:
                calls = code.co_name
        elif _is_users(code.co_filename):
            frame = _lines.raw_frame_to_frame(code, at)
            user_frame = SourceLine(
                file=frame.file_name,
                function=frame.function_name,
                line=frame.start_line,
                column=frame.start_column,
                end_line=frame.end_line,
                end_column=frame.end_column,
                differentiates=differentiates,
                calls=calls,
                inside=tuple(inside),
            )
            user_frames.append(user_frame)
            differentiates = ""
            calls = ""
        inside.append((code, at))
    return tuple(user_frames)


def _is_users(file: str) -> bool:
    if file.startswith((_HERE, _NUMPY)):
        return False
    return bool(_lines.is_user_filename(file))


def transforms_of(eqn: _t.JaxprEquation) -> list[str]:
    """Under which transformations JAX has made an equation: "jvp", "transpose", "vmap".

    The text of its stack of names has those of the user's scopes too.
    """
    names = eqn.source_info.name_stack.stack
    return [scope.name for scope in names if isinstance(scope, _lines.Transform)]
