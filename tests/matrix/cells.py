"""A cell of the matrix: what a face does under a transformation, against plain Python."""

from __future__ import annotations

from contextlib import ExitStack

import jax
import numpy as np
from faces import FACES, Host, Move, plain_of

import hostcall as hc


def bits(v):
    """A value with its dtype, so that equal ones compare equal, NaNs too."""
    if isinstance(v, str):
        return v
    if is_key(v):
        return str(v.dtype), bits(jax.random.key_data(v))
    v = np.asarray(v)
    if v.dtype.name in ("int2", "int4"):  # the unused bits of their bytes may differ
        return v.dtype.name, bits(v.astype(np.int8))
    return v.dtype.name, v.shape, v.tobytes()


def in_order(sights, parallel):
    """Devices that call at the same time have no order."""
    sights = [bits(v) for v in sights]
    return sorted(sights) if parallel else sights


def outcome(face, order, transformation, work, portable=False):
    """ "ok"; "again" if host code saw all values twice; "numbers" if it saw those of
    keys; or the error.
    """
    with ExitStack() as exits:
        host = Host(exits, transformation.spec, work, portable)
        oracle = Host(exits, transformation.spec, work)
        want = transformation.oracle(plain_of(face, oracle))
        try:
            op = FACES[face][1](host, order)
            got = jax.block_until_ready(transformation.program(op))
            seen = in_order(host.events(), transformation.parallel)
            want_seen = in_order(oracle.seen, transformation.parallel)
            assert want_seen
            check(got, want, transformation.parallel)
            if seen == 2 * want_seen:
                return "again"
            if is_key(host.spec) and seen != want_seen:
                assert seen == numbers(face, transformation, host)
                return "numbers"
            assert seen == want_seen
        except hc.errors.HostcallError as error:
            return f"{error.code}: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "ok"


def is_key(v):
    return jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)


def numbers(face, transformation, host):
    """What host code sees of keys if they come as their numbers."""
    raw = Host(host.exits, host.spec, Move)
    plain = plain_of(face, raw)
    transformation.oracle(lambda keys: plain(np.asarray(jax.random.key_data(keys))))
    return in_order(raw.seen, transformation.parallel)


def check(got, want, parallel):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    if parallel and len(want) > 1:  # the rows of MOVES
        assert in_order(got, parallel) == in_order(want, parallel)
        return
    for a, b in zip(got, want, strict=True):
        if parallel:
            a, b = np.sort(a), np.sort(b)
        if bits(a) != bits(b):  # derivatives
            a, b = np.asarray(a), np.asarray(b)
            assert (a.dtype, a.shape) == (np.dtype(np.float32), b.shape)
            np.testing.assert_allclose(a, b, rtol=1e-6)
