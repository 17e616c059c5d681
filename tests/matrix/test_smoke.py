"""Each function that a program can call, in each setting: `make test-fast` begins here.

Each face has its first order; test_matrix.py has the others, and more transformations.
"""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import jax
import pytest
from cells import outcome
from faces import FACES, Host, Square
from programs import SCALAR, SETTINGS, TRANSFORMATIONS, X, has_devices_for
from table import of_transformation

import hostcall as hc

FIRST = {face: orders[0] for face, (orders, _) in FACES.items()}


@pytest.mark.parametrize("face", FACES)
def test_a_face_in_each_setting(face):
    wrong = {}
    for name in filter(has_devices_for, SETTINGS):
        got = outcome(face, FIRST[face], TRANSFORMATIONS[name], Square)
        if not got.startswith(of_transformation(face, FIRST[face], name).starts):
            wrong[name] = got
    assert wrong == {}


class Broken(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError("failed on purpose")


class FailingHost(Host):
    """Host code that fails: the function, the item of a feed, or the file of a print."""

    def fn(self, v):
        raise OSError("failed on purpose")

    def item(self, k):
        if k:  # the first one says what the feed has
            raise OSError("failed on purpose")
        return super().item(k)

    def printed(self):
        self.exits.enter_context(redirect_stdout(Broken()))


# Machine code has no exceptions.
@pytest.mark.parametrize("face", [f for f in FACES if f != "hc.buffers.native"])
def test_a_failure_is_raised_with_its_own_words(face):
    with ExitStack() as exits:
        op = FACES[face][1](FailingHost(exits, SCALAR, Square), FIRST[face])
        with pytest.raises(Exception, match="failed on purpose"):
            program = jax.jit(op)
            program(X)  # a feed has an item for this one
            hc.barrier()
            jax.block_until_ready(program(X))
            hc.barrier()


def test_a_process_that_ends_at_once_makes_all_calls(run_python):
    """Its feeds and objects are open, and nobody has waited for a program."""
    done = run_python(
        """
        import atexit, sys
        sys.path[:0] = sys.argv[1:]
        seen = []

        # Before hostcall is imported, so that it runs after what hostcall does at the end.
        atexit.register(lambda: print(*seen, sep="\\n"))

        from contextlib import ExitStack
        import jax
        from faces import FACES, Host, Square
        from programs import SCALAR, X

        class Named(Host):
            face = ""
            printed = lambda self: None  # to the output of this process
            def fn(self, v):
                seen.append(self.face)
                return super().fn(v)
            def item(self, k):
                if k == 0:
                    seen.append(self.face)
                return super().item(k)

        exits = ExitStack()
        for face, (orders, make) in FACES.items():
            host = Named(exits, SCALAR, Square)
            host.face = face
            jax.jit(make(host, orders[0]))(X)
        """,
        *map(str, (Path(__file__).parents[1], Path(__file__).parent)),
    )
    want = [str(X) if face.endswith("print") else face for face in FACES]
    assert sorted(done.stdout.splitlines()) == sorted(want)
