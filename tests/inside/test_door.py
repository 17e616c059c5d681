"""The door to JAX's private parts: what programs on a CPU don't show."""

import jax
import numpy as np
import pytest

from hostcall import _jax
from hostcall._jax import execution


@pytest.mark.parametrize(
    ("wanted", "known", "value"),
    [
        ("n", {"mod(n, 4)": 1, "n": 9}, 9),
        ("n", {"mod(n, 4)": 1}, None),
        ("mod(n, 4)", {"mod(n, 4)": 1}, 1),
        ("floordiv(n, 2)", {"n": 9}, 4),
        ("n*m", {"n": 5, "m": 2}, 10),
        ("n*m", {"n": 5}, None),
        ("n*m", {"n*m": 10}, 10),
        ("n", {"2*n": 10}, None),  # nothing is solved
    ],
)
def test_sizes_from_sizes(wanted, known, value):
    assert _jax.size_from(wanted, known) == value


def test_reading_an_array_is_an_explicit_transfer():
    """On a CPU nothing is transferred and no guard is asked, so this test reads the
    flag.
    """
    from jax._src.lib import guard_lib

    class Seen:
        def __array__(self, dtype=None, copy=None):
            self.explicit = guard_lib.thread_local_state().explicit_device_get
            return np.zeros(3)

    seen = Seen()
    _jax.to_numpy(seen)
    assert seen.explicit
    assert not guard_lib.thread_local_state().explicit_device_get


class _Frames(_jax.ExecutionGuard):
    """Notes which functions of JAX's ask it, and whether they have a program."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forbids(self, frame):
        program = execution._program_that_asks(frame)
        self.seen.append((frame.f_code.co_name, program is not None))
        return False


def test_jax_asks_the_guard_where_it_has_the_program():
    """The frame that asks is all that says which program is about to run."""
    guard = _Frames()
    f = jax.jit(lambda x: x + 1)
    compiled = f.lower(1.0).compile()
    executed, fast_path = ("__call__", True), ("_get_fastpath_data", True)
    before = jax.no_execution.swap_local(guard)
    try:
        f(1.0)
        assert guard.seen == [executed, fast_path]
        f(1.0)
        assert guard.seen[2:] == []  # on the fast path
        compiled(1.0)
        assert guard.seen[2:] == [executed]
    finally:
        jax.no_execution.set_local(before)
