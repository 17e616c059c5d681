"""The exceptions; `hostcall.errors` draws their tree and says who sees which."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

# --- Codes ---------------------------------------------------------------------------
#
# `python -m hostcall explain hc-escape` prints the section of a code, which a file of
# docs/errors has. A message shows one code, as its last line, also if it quotes another
# message with a code (docs/design/errors.md).

# Compiled when a message is first read, not at import.
_LINE = r"\n?\[(hc-[a-z0-9-]+)\] python -m hostcall explain \1(?![a-z0-9-])"


def code_line(code: str) -> str:
    """The last line of a message with this code."""
    return f"[{code}] python -m hostcall explain {code}"


def with_code(text: str, code: str) -> str:
    """The text with the line of this code at its end, and no other such line."""
    return f"{without_code(text)}\n{code_line(code)}".lstrip("\n")


def without_code(text: str) -> str:
    """The text without lines of codes."""
    return re.sub(_LINE, "", text)


def code_in(text: str) -> str | None:
    """The code of a text, the last one if it has more lines of codes."""
    codes: list[str] = re.findall(_LINE, text)
    return codes[-1] if codes else None


# --- The exceptions ------------------------------------------------------------------


class ReplacesReport:
    """Base of exceptions that are raised in place of JAX's report of a failed program.

    Where a result is read, JAX raises a JaxRuntimeError with the text of a callback's
    exception. One of this class is raised there itself.
    """


class HostcallError(Exception):
    """The base class of all errors that hostcall itself raises.

    Attributes:
        code: what happened, as a name that stays the same between versions. `python -m
            hostcall explain CODE` says why, and what to do.

    `str(error)` ends with a line that has the code and that command. `error.args` have
    the message without it.
    """

    code = "hc-failed"

    def __init__(self, *args: Any, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return with_code(super().__str__(), self.code)


class SpecError(HostcallError, ValueError):
    """The `result`, options or arguments of a call are invalid."""

    code = "hc-spec"


class BatchingError(HostcallError, ValueError):
    """`vmap` can't batch a call with its options, or its own batching rule is wrong."""

    code = "hc-batching"


class DerivativeError(HostcallError, ValueError):
    """A call was differentiated or transposed, and has no rule for that."""

    code = "hc-derivative"


class ResultError(HostcallError, ValueError):
    """The function returned something that differs from what `result` declares."""

    code = "hc-result"


class EscapeError(HostcallError, RuntimeError):
    """The function kept a reference to a view of lent memory after the call."""

    code = "hc-escape"


class UnwrittenError(HostcallError, RuntimeError):
    """The function returned without writing all of its lent `out`."""

    code = "hc-unwritten"


class CallTimeoutError(HostcallError, TimeoutError):
    """The function took longer than its `timeout=`."""

    code = "hc-timeout"


class DeadlockError(HostcallError, RuntimeError):
    """A callback started a program that would wait for the program that called it."""

    code = "hc-deadlock"


class FeedError(HostcallError, RuntimeError):
    """A feed can't give an item: none came in time, or the feed is closed."""

    code = "hc-feed"


class FeedEndError(FeedError):
    """A program wanted an item after the last one of a feed with on_end="raise"."""

    code = "hc-feed-end"


class ExportError(HostcallError, NotImplementedError):
    """A program was exported or serialized, and its host functions can't go with it."""

    code = "hc-export"


class LoadError(HostcallError, ValueError):
    """A file or text that describes a program can't be read, or does not fit."""

    code = "hc-load"


class RegistryError(HostcallError, LookupError):
    """A name is not registered here, or is taken (`hc.register`)."""

    code = "hc-registry"


class PackageError(HostcallError, ModuleNotFoundError):
    """A part of hostcall needs a package that is not installed, or can't be imported.

    `name` is the module.
    """

    code = "hc-package"

    @staticmethod
    def needed(module: str, who: str, package: str, instead: str = "") -> Any:
        """Imports a module of an optional package.

        Args:
            module: what to import.
            who: the function that needs it, for the message.
            package: what to install: "hostcall[record]", or a package of no extra.
            instead: what to do without it.

        Raises:
            PackageError: it can't be imported. The error says what to type.
        """
        try:
            return importlib.import_module(module)
        except ImportError as error:
            name, _, _ = module.partition(".")
            state = f"can't be imported ({error})"
            # Else the package is there, and what it imports is not.
            if isinstance(error, ModuleNotFoundError) and error.name in (name, module):
                state = "is not installed"
            install = f'pip install "{package}"'
            if package.startswith("hostcall"):
                # There is no release, so pip finds no "hostcall[...]" anywhere.
                extra = package.replace("hostcall", ".", 1)
                in_checkout = f'pip install "{extra}"'
                install = (
                    f"pip install {name}; in a checkout of hostcall: {in_checkout}"
                )
            if instead:
                install = f"{install}; or {instead}"
            missing = PackageError(
                f"hostcall: {who} needs the package {name}, which {state}. Install it:"
                f" {install}"
            )
            missing.name = name
            raise missing from error


# --- Words of messages ---------------------------------------------------------------


def wrong(
    option: str, owner: str, wanted: str, got: Any, advice: str = ""
) -> SpecError:
    """The error for `option=` of `owner`, which should be `wanted`."""
    if isinstance(got, int) and got.bit_length() > 256:
        # Python refuses to write a very long one.
        shown = f"an int of {got.bit_length()} bits"
    else:
        shown = repr(got)
    return SpecError(
        f"hostcall: {option}= of {owner} should be {wanted}, got {shown}{advice}",
        code="hc-option",
    )


def conflict(owner: str, refused: str) -> SpecError:
    """The error for options of `owner` that do not go together."""
    return SpecError(f"hostcall: {owner} has {refused}", code="hc-conflict")


def choices(allowed: Sequence[object]) -> str:
    return f"one of {', '.join(map(repr, allowed))}"


def counted(number: int, noun: str) -> str:
    """The number with its noun: "1 tap", "3 taps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, HostcallError):
        # Where users import them from, and what tracebacks show.
        _class.__module__ = "hostcall.errors"
