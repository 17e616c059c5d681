"""The one door to JAX's private parts.

Modules outside this folder must not name anything under `jax._src` and must not replace
any of JAX's functions or attributes (tests/repo/test_layers.py reads the imports). All
of these files were read against and run with JAX 0.9.0 to 0.12.0.1.

    needs         the table of what hostcall needs of JAX that JAX does not promise
    door          JAX's private modules, which are checked against that table
    types         names for what JAX passes to us
    versions      what the versions of JAX keep in different places
    patches       the table of what hostcall replaces in JAX
    installing    installs it where it is first needed, and takes it back
    tracing       primitives, effects, rules, and values while a program is traced
    dtypes        typed keys, float0, the x64 setting, symbolic sizes
    lowering_api  how to add lowering rules, and what a rule asks of JAX
    program       what JAX knows about the program of an equation that it lowers
    operations    the operations that hostcall emits into such a program
    hoisting      keeps calls with effects in the scans that they are in
    while_loops   runs host calls once in loops that JAX runs twice
    loop_conditions lowers loops whose conditions have host calls
    dispatch      programs that a thread has dispatched: order, waits, who hears of them
    fast_dispatch programs with host calls on JAX's fast dispatch
    program_order one order for all host calls of a program
    device_order  ordered programs over different devices
    signs         how a thread learns of those that it has dispatched
    execution     what looks at each program before JAX runs it
    jaxprs        questions to jaxprs and equations, and ways to run them
    rewriting     puts equations into programs where they are lowered
    rewritten_programs  which programs of a thread are rewritten
    fragments     the equations that are put in
    pauses        loops that pause between their steps
    while_parts   a scan as a while loop, for these
    user_lines    the user's frames in which an equation was traced
    places        where an equation is: its lines, loops and shard
    settings      a thread's settings, as they are where a call is traced
    devices       devices, clients, arrays on them, and NumPy's arrays of these
    exporting     what leaves the process with an exported program
    coordination  the store that the processes of a job share
    connections   the TCP connections between these processes
    callbacks     JAX's own callbacks: primitives, effects, loggers, old flags

Other modules write `_jax.name`: every public name of these files is exported here.
"""

from hostcall._jax.door import unfit_for as _unfit_for

try:
    from hostcall._jax.callbacks import *  # noqa: F403
    from hostcall._jax.connections import *  # noqa: F403
    from hostcall._jax.coordination import *  # noqa: F403
    from hostcall._jax.device_order import *  # noqa: F403
    from hostcall._jax.devices import *  # noqa: F403
    from hostcall._jax.dispatch import *  # noqa: F403
    from hostcall._jax.door import refuse as refuse
    from hostcall._jax.door import refuse_by as refuse_by
    from hostcall._jax.dtypes import *  # noqa: F403
    from hostcall._jax.execution import *  # noqa: F403
    from hostcall._jax.exporting import *  # noqa: F403
    from hostcall._jax.fast_dispatch import *  # noqa: F403
    from hostcall._jax.hoisting import *  # noqa: F403
    from hostcall._jax.installing import *  # noqa: F403
    from hostcall._jax.lowering_api import *  # noqa: F403
    from hostcall._jax.needs import INSTALL as INSTALL
    from hostcall._jax.needs import NEWEST as NEWEST
    from hostcall._jax.needs import OLDEST as OLDEST
    from hostcall._jax.needs import Part as Part
    from hostcall._jax.operations import *  # noqa: F403
    from hostcall._jax.patches import *  # noqa: F403
    from hostcall._jax.program import *  # noqa: F403
    from hostcall._jax.program_order import *  # noqa: F403
    from hostcall._jax.settings import *  # noqa: F403
    from hostcall._jax.signs import *  # noqa: F403
    from hostcall._jax.tracing import *  # noqa: F403
    from hostcall._jax.types import *  # noqa: F403
    from hostcall._jax.versions import *  # noqa: F403
    from hostcall._jax.while_loops import *  # noqa: F403
except (AttributeError, ImportError) as error:  # a public name of JAX's has gone
    _unfit = _unfit_for(error)
    if _unfit is None:
        raise
    raise _unfit from error
