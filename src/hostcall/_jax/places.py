"""Where an equation of a program is: its lines of the user's, its loops, its shard.

One walk over a program (`rewriting.py`) gives each equation its `EqnPath`: the
equation, and the path of the one that it is inside of. What is known of an equation is
known of that path. JAX notes for each equation only the frames of its own trace. A
function that is jitted has a trace of its own, so an equation inside `jnp.linalg.norm`
has no frame of the user's; the call of `norm`, the equation around it, has one.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from hostcall._jax import types as _t
from hostcall._jax.jaxprs import LOOPS
from hostcall._jax.user_lines import SourceLine, lines_of, transforms_of
from hostcall._jax.versions import newly_manual_axes

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for key, path in sysconfig.get_paths().items()
    if key in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGES = "site-packages", "dist-packages"


@functools.lru_cache(maxsize=1024)
def in_library(file: str) -> str | None:
    """A file's path inside an installed package or Python's own library, such as
    `optax/transform.py`; None for a file of the user's.
    """
    folders = os.path.realpath(file).split(os.sep)
    for folder in _PACKAGES:
        if folder in folders:
            at = len(folders) - folders[::-1].index(folder)
            return os.sep.join(folders[at:])
    path = os.path.realpath(file)
    for folder in _LIBRARIES:
        if path.startswith(folder):
            return path[len(folder) :]
    return None


@dataclass(frozen=True, eq=False)
class EqnPath:
    """An equation of a program, with the equations that it is inside of.

    Attributes:
        eqn: the equation.
        outer: the path of the equation that it is inside of; None: of none.
    """

    eqn: _t.JaxprEquation
    outer: EqnPath | None = None

    @functools.cached_property
    def eqns(self) -> tuple[_t.JaxprEquation, ...]:
        """The equations around it and itself, the outermost first."""
        around = self.outer.eqns if self.outer else ()
        return (*around, self.eqn)

    @functools.cached_property
    def lines(self) -> tuple[SourceLine, ...]:
        """The frames outside of JAX in which it was traced, the innermost first, with
        those of the equations around it.
        """
        around = self.outer.lines if self.outer else ()
        return (*lines_of(self.eqn), *around)

    @property
    def line(self) -> SourceLine | None:
        """The innermost of its lines, which may be in a library."""
        return next(iter(self.lines), None)

    @property
    def users_line(self) -> SourceLine | None:
        """The innermost line in a file of the user's; the innermost one if all are in
        libraries.
        """
        user_lines = (line for line in self.lines if in_library(line.file) is None)
        return next(user_lines, self.line)

    @functools.cached_property
    def transforms(self) -> tuple[str, ...]:
        """Under which transformations JAX has made it, the outermost first."""
        return tuple(name for eqn in self.eqns for name in transforms_of(eqn))

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to a backward pass."""
        return "transpose" in self.transforms

    @property
    def vmaps(self) -> int:
        """How many vmaps it is under."""
        return self.transforms.count("vmap")

    @functools.cached_property
    def loops(self) -> list[EqnPath]:
        """The places of the loops around it, the outermost first."""
        if self.outer is None:
            return []
        if self.outer.eqn.primitive.name not in LOOPS:
            return self.outer.loops
        return [*self.outer.loops, self.outer]

    @functools.cached_property
    def meshes(self) -> list[tuple[_t.Mesh, frozenset[str]]]:
        """The mesh of each shard_map around it, and over which axes it is manual."""
        return meshes_of(self.eqns[:-1])


def meshes_of(
    around: Sequence[_t.JaxprEquation],
) -> list[tuple[_t.Mesh, frozenset[str]]]:
    meshes: list[tuple[_t.Mesh, frozenset[str]]] = []
    for eqn in around:
        if eqn.primitive.name == "shard_map":
            meshes.append((eqn.params["mesh"], newly_manual_axes(eqn.params)))
    return meshes


def within_shard(around: Sequence[_t.JaxprEquation]) -> list[_t.JaxprEquation]:
    """The equations around a place that are inside its innermost shard_map."""
    inside: list[_t.JaxprEquation] = []
    for eqn in reversed(around):
        if eqn.primitive.name == "shard_map":
            break
        inside.append(eqn)
    return inside
