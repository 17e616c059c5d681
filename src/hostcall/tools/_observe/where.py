"""`only=` and `ignore=`: which lines of source an `hc.observe` block looks at.

A pattern names a file ("train.py", "models/attention.py"), a package or module
("optax", "optax.losses") or a function ("loss_fn", "Model.loss"), with `*` for
anything. A place in a library has two lines: its own, and the user's that led there. It
is meant if a pattern names either.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hostcall._jax.places import EqnPath, in_library
from hostcall.tools._observe import labels


@dataclass(frozen=True)
class Where:
    """Which lines are looked at.

    Attributes:
        only: patterns, of which one must name a line; none: all lines are looked at.
        ignore: patterns of which none may.
    """

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def has(self, place: EqnPath) -> bool:
        """Whether an equation is looked at."""
        lines = [line for line in (place.line, place.users_line) if line is not None]
        return self._has([(line.file, line.function) for line in lines])

    def has_variable(self, file: str, function: str) -> bool:
        """Whether a variable of this function is. If nothing names lines, it has to be
        in a file of the user's.
        """
        if not self.only and in_library(file) is not None:
            return False
        return self._has([(file, function)])

    def _has(self, lines: Sequence[tuple[str, str]]) -> bool:
        def named_by(patterns: tuple[str, ...]) -> bool:
            return any(
                names(pattern, file, function)
                for pattern in patterns
                for file, function in lines
            )

        return (not self.only or named_by(self.only)) and not named_by(self.ignore)


@functools.lru_cache(maxsize=4096)
def names(pattern: str, file: str, function: str) -> bool:
    """Whether a pattern names a file, the package or module that it is, or a function
    in it.
    """
    if pattern == labels.short(file):
        return True
    if "/" in pattern or pattern.endswith(".py"):
        path = file.replace(os.sep, "/")
        return fnmatchcase(path, pattern) or fnmatchcase(path, f"*/{pattern}")
    # That of a function inside of another one.
    _, _, own_name = function.rpartition("<locals>.")
    candidates = [function, own_name, own_name.rpartition(".")[2]]
    packages = _module_of(file).split(".")
    candidates += [".".join(packages[: n + 1]) for n in range(len(packages))]
    return any(fnmatchcase(candidate, pattern) for candidate in candidates)


@functools.lru_cache(maxsize=1024)
def _module_of(file: str) -> str:
    """The dotted name of a file's module, as its packages say."""
    path = in_library(file)
    if path is None:
        folder, path = os.path.split(file)
        while os.path.exists(os.path.join(folder, "__init__.py")):
            folder, package = os.path.split(folder)
            path = os.path.join(package, path)
    packages = path.removesuffix(".py").removesuffix(os.sep + "__init__").split(os.sep)
    return ".".join(packages)
