"""Where a program makes a call: its devices, who calls for whom, on which thread.

An equation says what is called and with what. It is the same in every program. A
`Placement` says the rest, for one call of one program: which devices there are and
which of them call, how an outcome reaches the others, and where the host code runs.
Nothing changes one that is made. placing.py decides what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hostcall import _native
from hostcall._jax.types import Device, Mesh
from hostcall._native import Inside

if TYPE_CHECKING:
    from hostcall._job.after_failure import Failures


class Team(NamedTuple):
    """How the devices of a program make a call together (native/base/team.h).

    Attributes:
        mode: the name of a `_native.TeamMode`. With "ONCE" one device calls for all;
            with "EACH" each calls, and all fail if one does.
        size: the number of this process's devices.
        leader: the ordinal of the device that calls; None for the first that comes.
    """

    mode: Literal["ONCE", "EACH"]
    size: int
    leader: int | None

    def settings(self) -> _native.TeamSettings:
        mode = _native.TeamMode[self.mode]
        return _native.TeamSettings(mode=mode, size=self.size, leader=self.leader)


class Reach(NamedTuple):
    """How the outcome of a call reaches all devices of its program, those of other
    processes too (_primitives/outcome.py emits it).

    Attributes:
        devices: how many there are.
        caller: the number of the device whose results all take; None if each makes its
            own call.
        returns_outcome: whether the call has its outcome as one more result.
    """

    devices: int
    caller: int | None = None
    returns_outcome: bool = True


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one call of one program is made.

    Attributes:
        devices: this process's devices by their ordinal; at -1 the device whose arrays
            Python has on the host, outside of the engine's programs.
        mesh: that of the enclosing shard_map or pmap.
        program_devices: the devices of the program, those of other processes too; None
            if there is one, empty if they are not known.
        team: how the devices make the call together; None if each makes its own.
        reach: how the outcome reaches all processes; None if it stays in each.
        called_by_other_process: whether another process makes the call, and this one
            takes its results.
        calling_process: the process whose results all take; None if each has its own.
        origins: if each device makes a call and all fail together, the process of each
            device of the program; empty if they are not known. Else None.
        job: where failures are noted if several processes run the program.
        only: of a tap, the ordinals of the devices that tap; empty for all.
        nested: of a tap, whether host code runs the program, inside another callback:
            it never waits for space in the queue then.
        linked: of a tap, whether it has a result that only says that it ran.
        blocks: of a tap with on="shards", by ordinal the index of each array's block.
        plan_of_block: makes the plan of one device from the text of its block, if the
            compiler chooses the blocks (_primitives/blocks.py).
        text: describes the call in other processes (_export/texts.py), or "".
        host_device: JAX's default device inside the callback.
        packed: whether elements smaller than a byte are packed, as in XLA's buffers but
            not in NumPy's arrays.
        inside: which of the calls run inside one of XLA's host callbacks.
    """

    devices: Mapping[int, Device | None]
    mesh: Mesh | None = None
    program_devices: tuple[Device, ...] | None = None
    team: Team | None = None
    reach: Reach | None = None
    called_by_other_process: bool = False
    calling_process: int | None = None
    origins: tuple[int, ...] | None = None
    job: Failures | None = None
    only: tuple[int, ...] = ()
    nested: bool = False
    linked: bool = False
    blocks: Mapping[int, tuple[Any, ...]] | None = None
    plan_of_block: Callable[[str], _native.Plan] | None = None
    text: str = ""
    host_device: Device | None = None
    packed: bool = False
    inside: Inside = Inside.NEVER

    @property
    def returns_outcome(self) -> bool:
        """Whether one more result tells all processes whether the call failed
        (native/plan/outcome.h).
        """
        return self.reach is not None and self.reach.returns_outcome
