"""Calls that a program takes with it out of the process, as texts.

The text of a call of registered host code stands in the program, beside the name of its
slot (lowering.py), or in an exported program in place of it. It says all that the
engine must know to make the call's plan (`_export/records.py` has the equation). XLA
hands it back when it loads the program, here or elsewhere:

    lowered here        the slot's plan is found, and its text is this one: no Python
    exported            there is no slot: `read_text`
    serialized          the slot, if there is one of that name, may be of another call,
                        and then has another text: `read_text`

`read_text` is called twice. When the program is loaded it checks the text, by making
the plan as far as the shapes are known, and dropping it: so a missing name or a wrong
item of a feed is an error before anything runs. When the program first runs it makes
the plan that is kept. Symbolic shapes are known then, and the shapes in the text are
compared with those of XLA's buffers.

What is read comes from a file, so nothing in it is trusted: names are looked up in the
registry, and everything else is numbers and texts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from hostcall import _jax, _native
from hostcall._core.errors import HostcallError, LoadError
from hostcall._engine import targets
from hostcall._engine.info import CallInfo, Team
from hostcall._engine.plans import plan_in_program
from hostcall._export import codec, records
from hostcall._export.codec import Malformed, NotPortable, Told
from hostcall._jax.types import Aval, Client, Mesh
from hostcall._runtime import context, host_device

ATTRIBUTE = "text"


# --- Telling ------------------------------------------------------------------------


def tell(
    program: _jax.Program,
    info: CallInfo,
    avals: Sequence[Aval],
    only: Sequence[int],
) -> str:
    """The text of a call or tap. `only` are the ordinals of the devices that tap.

    Raises NotPortable.
    """
    params, team = info.params, info.team
    told = records.tell(params, avals, exported=program.is_exported)
    if program.across:
        raise NotPortable("its program runs over several processes")
    if program.automatic:
        raise NotPortable("it is in a shard_map that is manual over some axes only")
    if program.is_exported and team is not None and params.options.sharding is not None:
        raise NotPortable(
            "it has on=, which names a device, and the program may run on other"
            " devices. Leave out on=: the first device that comes then calls"
        )
    told |= {
        "hostcall": codec.FORMAT,
        "team": None if team is None else list(team),
        "only": list(only),
        "linked": params.effect is not None and _jax.has_symbolic(params.out_avals),
        "mesh": _tell_mesh(program.mesh),
    }
    known = codec.sizes_in(list(buffers_of(told)))
    # What can be computed does not depend on the values.
    _, unknown = _values(
        told, dict(zip(known, itertools.count(1009, 10), strict=False))
    )
    if unknown:  # its plan could not be made
        raise NotPortable(
            f"the sizes {', '.join(unknown)} don't follow from the shapes of its arrays"
            f" ({', '.join(known) or 'all constant'}). Pass the call an array that has"
            " the missing size as a dimension (to a rule for derivatives, among the"
            " residuals), or export with a constant size"
        )
    return codec.write(told)


def _tell_mesh(mesh: Mesh | jax.sharding.AbstractMesh | None) -> Told:
    """[names of axes, their sizes, ids of devices]; None without devices."""
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return None
    if not all(isinstance(name, str) for name in mesh.axis_names):
        return None
    ids = [int(device.id) for device in mesh.devices.flat]
    return [list(mesh.axis_names), list(mesh.devices.shape), ids]


# --- Reading ------------------------------------------------------------------------


def parse(text: str) -> Told:
    """What a text says; of that, only the version and the sizes are checked.

    Raises LoadError.
    """
    try:
        told = codec.read(text)
        if not isinstance(told, dict) or "hostcall" not in told:
            raise Malformed("it names no version")
        for size in codec.sizes_in(told):
            if not _SIZE.fullmatch(size):
                raise Malformed(f"the size {size!r}")
    except Malformed as error:
        raise LoadError(
            "hostcall: the program has a call whose description can't be read"
            f" ({error}). It was damaged, or not made by hostcall"
        ) from error
    version = told["hostcall"]
    if version != codec.FORMAT:
        raise LoadError(
            f"hostcall: the program has a call in version {version} of hostcall's"
            f" format, and this hostcall reads version {codec.FORMAT}. Export it"
            " with this version, or load it with the one that exported it"
        )
    return told


# A size with names, such as "2*b + floordiv(n^2, 4)". JAX multiplies powers out.
_SIZE = re.compile(r"(?:[\w\s+*/,()-]|\^[0-9](?![0-9])){1,1000}")


def check(told: Told) -> None:
    """Reads what a text says, with any sizes in place of the symbolic ones.

    Raises LoadError, or RegistryError if this process lacks its function.
    """
    with reading():
        records.read(_with_any_sizes(told))


def _with_any_sizes(told: Told) -> Told:
    return codec.with_sizes(told, dict.fromkeys(codec.sizes_in(told), 1))


def read_text(
    text: str, on_cuda: bool, buffers: list[list[int]] | None
) -> _native.Plan | None:
    """Checks a text, and makes the plan of its call. Called by the engine.

    Args:
        text: what `tell` made.
        on_cuda: whether the program runs on CUDA, else on the CPU.
        buffers: XLA's types and shapes of the operands and results; None when the
            program is loaded.

    Returns:
        The plan; None when the program is loaded.
    """
    platform = "cuda" if on_cuda else "cpu"
    client = _client(platform)
    targets.start_on(client)
    told = parse(text)
    with reading():
        sizes = codec.sizes_in(told)
        if buffers is not None:
            told = _with_sizes(told, buffers) if sizes else told
            _check_buffers(told, buffers)
        params, found = records.read(_with_any_sizes(told))
        if buffers is None and sizes:
            return None
        mesh = _read_mesh(found["mesh"], client)
    by_ordinal = {_jax.ordinal(device): device for device in client.local_devices()}
    team = None if found["team"] is None else Team(*found["team"])
    if team is not None and found["place"]:  # exported, so on any devices
        team = team._replace(leader=None)
    operands = found["operands"]
    info = params.info(by_ordinal, mesh, operands)
    info.tap = params.settings(found["only"], host_device.is_host(client))
    info.of_program = None if team is None else ()
    info.team, info.text = team, text
    plan = plan_in_program(info, operands, client, (platform,))
    return None if buffers is None else plan


# What reading raises if a text is not what `tell` made. All else has another cause, and
# is passed on as it is.
_SAY_DAMAGED = (
    *(Malformed, LookupError, TypeError, ValueError, AttributeError, RecursionError),
    ArithmeticError,
)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turns what a wrong text leads to into LoadErrors."""
    try:
        yield
    except HostcallError:
        raise
    except _SAY_DAMAGED as error:
        what = f"leads to {error!r}"
        if isinstance(error, Malformed):
            what = f"names {error}"
        elif isinstance(error, KeyError):
            what = f"lacks {error}"
        raise LoadError(
            f"hostcall: the program has a call whose description {what}. It was"
            " damaged, or another version of hostcall made it"
        ) from error


def _client(platform: str) -> Client:
    """The client on which this thread loads a program: host code's own inside it.

    A default device of another platform says nothing: JAX loads a program for the
    platform of its arguments too. Nor does host code's device outside of host code:
    XLA's threads keep the settings of the calls that they have made.
    """
    default = getattr(_jax.default_device.value, "client", None)
    # A GPU's client calls its platform "gpu" or "cuda".
    fits = default is not None and (default.platform == "cpu") == (platform == "cpu")
    if fits and (context.current() is not None or not host_device.is_host(default)):
        return default
    return _jax.client_of(platform)


def buffers_of(told: Told) -> tuple[list[Told], list[Told]]:
    """[dtype, *shape] of the operands and of the results that the program passes."""
    results = records.kind_of(told).results_in(told)
    number = [["int32"]] if told["linked"] else []  # see lowering.py
    return [*number, *told["operands"]], [*number, *results]


def _with_sizes(told: Told, buffers: list[list[int]]) -> Told:
    """What `told` says, with the sizes that these buffers have."""
    known: dict[str, int] = {}
    wanted = itertools.chain(*buffers_of(told))
    for (_, *symbolic), (_, *actual) in zip(wanted, buffers, strict=True):
        for size, value in zip(symbolic, actual, strict=True):
            known |= dict.fromkeys(codec.sizes_in(size), value)
    values, unknown = _values(told, known)
    if unknown:
        raise LoadError(
            f"hostcall: the sizes {', '.join(unknown)} of a call don't follow from the"
            " shapes of its arrays,"
            f" {', '.join(f'{name} = {value}' for name, value in known.items())}. Pass"
            " the call an array that has each size as a dimension, and export again"
        )
    return codec.with_sizes(told, values)


def _values(told: Told, known: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """(the values of symbolic sizes, those that don't follow from the known ones)."""
    every = {name: _jax.size_from(name, known) for name in codec.sizes_in(told)}
    values = {name: value for name, value in every.items() if value is not None}
    return values, [name for name in every if name not in values]


def _check_buffers(told: Told, buffers: list[list[int]]) -> None:
    """Refuses a text that says more or less memory than XLA passes."""
    described = itertools.chain(*buffers_of(told))
    wanted = [[codec.XLAS_DTYPES.get(t), *shape] for t, *shape in described]
    if wanted != buffers:
        raise LoadError(
            "hostcall: the program passes other arrays to a call than its description"
            f" says (XLA's dtypes and shapes: {buffers}, described: {wanted}). It was"
            " changed after hostcall made it"
        )


def _read_mesh(told: Told, client: Client) -> Mesh | None:
    if told is None:
        return None
    names, sizes, ids = told
    number = math.prod(sizes)
    by_id = {device.id: device for device in client.devices()}
    # The mesh only tells functions where their block is (`hc.current()`). A program may
    # run on other devices than those that it was exported on, and nothing says which.
    found = [by_id[i] for i in ids if i in by_id]
    if len(found) < number:
        found = list(by_id.values())[:number]
    if len(found) < number:
        raise LoadError(
            f"hostcall: the program runs over {number} devices, and this process has"
            f" {len(by_id)}. Start it with more devices (on CPUs by"
            " jax.config.update('jax_num_cpu_devices', n), before JAX is used), or"
            " export the program for fewer"
        )
    devices = np.array(found[:number], dtype=object).reshape(sizes)
    return jax.sharding.Mesh(devices, names)
