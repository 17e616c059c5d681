"""Lets the processes of a job go on together, after a program over them failed in all.

The danger: a collective that one process has begun, and another one never will. Either
the first is still in it; then its program has not ended, and `recover` waits for that,
and gives up. Or it was a one-way one (a permutation) and has sent its value, which the
other's next permutation would take for its own.

So after the meeting, a program sends a number that nobody could know before from every
device to every other, and sums and gathers it. A value left over from before shows as a
wrong number. All collectives of JAX on CPUs with all of a program's devices use one
communicator, so the ones left over are among those that this program reads. Two things
are not seen: permutations in programs over only some of the job's devices, and GPUs,
where this has not been run.

Steps, in all processes

  1. Wait for this process's programs over several processes to end.
  2. Meet: from here on nobody runs anything from before.
  3. Forget the failures, the tokens of failed programs, and the refusal.
  4. Run the check. If it does not end in time, the process ends itself (peers.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hostcall import _jax
from hostcall._core import failures
from hostcall._core.errors import HostcallError
from hostcall._runtime import job, peers, stuck


def recover(timeout: float) -> list[str]:
    lost = job.what_failed()
    if _jax.job_size() == 1:
        lost += [str(error) for error in failures.failures_of_effects()]
        return lost
    gone = sorted(peers.gone())
    if gone:
        raise HostcallError(
            "hostcall: recover() needs all processes of the job, and these have ended:"
            f" {gone}. End the others too, and restart the job from the last"
            " checkpoint",
            code="hc-process",
        )
    until = time.monotonic() + timeout
    peers.pause(True)
    try:
        _wait_for_programs(until, timeout)
        for error in _failures_of_effects(until, timeout):
            text = failures.without_number(str(error)).removeprefix("INTERNAL: ")
            if text not in lost:
                lost.append(text)
        nonce = _meet(until, timeout)
        peers.next_round()
        job.allow()
        _check(nonce)
    finally:
        peers.pause(False)
    return lost


def _wait_for_programs(until: float, timeout: float) -> None:
    waiting = list(filter(stuck.is_pending, jax.live_arrays()))
    while any(map(stuck.is_pending, waiting)):
        if time.monotonic() >= until:
            raise _still_runs(timeout)
        time.sleep(0.01)


def _failures_of_effects(until: float, timeout: float) -> list[BaseException]:
    """Waits for programs with effects too, whose results may all have been dropped."""
    tokens = _jax.tokens()  # of this thread, as those below

    def wait() -> None:
        for token in tokens:
            with contextlib.suppress(BaseException):  # it is raised below
                token.block_until_ready()

    waiting = threading.Thread(target=wait, daemon=True, name="hostcall-recover")
    waiting.start()  # it may stay in XLA for ever
    waiting.join(max(0.1, until - time.monotonic()))
    if waiting.is_alive():
        raise _still_runs(timeout)
    return failures.failures_of_effects()


def _still_runs(timeout: float) -> HostcallError:
    return HostcallError(
        f"hostcall: recover() has waited {timeout:g} s for a program over several"
        " processes that still runs here. It waits in a collective for a process that"
        " failed outside of it, and can't be ended. End all processes of the job, and"
        " restart them from the last checkpoint",
        code="hc-process",
    )


_meetings = 0


def _meet(until: float, timeout: float) -> int:
    """Waits for the other processes' recover(); returns a number that all agree on."""
    global _meetings
    _meetings += 1
    place = f"hostcall/recover/{_meetings}"
    rank = _jax.job_rank()
    if rank == 0:
        _jax.job_put(f"{place}/nonce", str(int.from_bytes(os.urandom(3), "little")))
    try:
        _jax.job_meet(place, max(0.1, until - time.monotonic()))
        nonce = _jax.job_get(f"{place}/nonce", 1.0)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise HostcallError(
            f"hostcall: recover() has waited {timeout:g} s for the other processes of"
            " the job, and not all have called it. Call it in all of them, after each"
            f" has raised the failure. The service says: {reason}",
            code="hc-process",
        ) from None
    assert nonce is not None  # process 0 puts it before it comes to the meeting
    return int(nonce)


# Seconds for the check, which all processes compile first.
_CHECKING = 120.0


def _check(nonce: int) -> None:
    """Raises, or ends the process, if the processes' collectives are out of step."""
    done = threading.Event()
    peers.must_end(done, _CHECKING, "the check of hc.recover()")
    try:
        wrong = _wrong_values(nonce)
    except Exception as error:
        text = f"the check failed: {failures.summary(error)}"
    else:
        text = f"{wrong} of the check's values are wrong" if wrong else ""
    finally:
        done.set()
    if text:
        job.failed(f"hc.recover(): {text}")
        raise HostcallError(
            f"hostcall: recover() finds the processes out of step: {text}. A collective"
            " that only some of them began before the failure has left values behind."
            " End all processes of the job, and restart them from the last checkpoint",
            code="hc-process",
        )


def _wrong_values(nonce: int) -> int:
    devices = jax.devices()
    n = len(devices)
    mesh = Mesh(np.array(devices), ("d",))
    sent = (np.arange(n, dtype=np.uint32) * np.uint32(7919) + np.uint32(nonce)) | 1
    rows = NamedSharding(mesh, P("d"))
    x = jax.make_array_from_callback((n,), rows, lambda index: sent[index])

    def check(x: jax.Array) -> jax.Array:
        here = jax.lax.axis_index("d")
        everyone = jnp.asarray(sent)
        wrong = jnp.sum(jax.lax.all_gather(x[0], "d") != everyone)
        wrong += jax.lax.psum(x[0], "d") != jnp.sum(everyone, dtype=jnp.uint32)
        for shift in range(1, n):
            came = jax.lax.ppermute(x[0], "d", [(i, (i + shift) % n) for i in range(n)])
            wrong += came != everyone[(here - shift) % n]
        return wrong[None].astype(jnp.int32)

    checked = jax.shard_map(check, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    got = jax.jit(checked)(x)
    return sum(int(np.asarray(shard.data).sum()) for shard in got.addressable_shards)
