"""The one door to JAX's private parts.

No module outside of this folder names anything under `jax._src`, or replaces anything
of JAX's (tests/repo/test_layers.py reads the imports). Each entry says what needs it.
All were read and run in 0.10.2 and 0.12.0.1; where the two differ, a branch asks for
the name, not for the version.

    tracing       primitives, their rules, and values while a program is traced
    dtypes        typed keys, float0, the x64 setting; arrays as NumPy's
    lowering      what the lowering of a program knows, and how rules take part
    custom_call   XLA's custom calls in a program's text, on one device or many
    effects       effects, and the tokens that stand for them
    dispatch      what a thread dispatches, told as it happens
    execution     settings that programs are checked against before they run
    devices       devices, clients, and arrays on them
    callbacks     JAX's own callbacks: primitives, effects, loggers, old flags
    reports       the error that JAX raises for a failed program, as it is made

Others write `_jax.name`: every public name of these files is one of this module's.
"""

from hostcall._jax.callbacks import *  # noqa: F403
from hostcall._jax.custom_call import *  # noqa: F403
from hostcall._jax.devices import *  # noqa: F403
from hostcall._jax.dispatch import *  # noqa: F403
from hostcall._jax.dtypes import *  # noqa: F403
from hostcall._jax.effects import *  # noqa: F403
from hostcall._jax.execution import *  # noqa: F403
from hostcall._jax.lowering import *  # noqa: F403
from hostcall._jax.reports import *  # noqa: F403
from hostcall._jax.tracing import *  # noqa: F403
