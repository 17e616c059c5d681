"""The TCP connections between the processes of a job.

Each process is connected with the coordination service, which process 0 runs, as long
as it lives: the kernel closes the connection when the process has ended, whatever ended
it. So process 0 knows how many others are left without a word of theirs.

On CPUs the processes are also connected with each other, by Gloo, which has no way to
give a collective up: a process waits in one until the connection to a neighbour closes.
`close_collectives` closes this process's own, and its collectives raise.

    who waits for whom in an all-reduce of 8, after process 1 has failed:
    7 <- 6 <- 5 <- 4 <- 3 <- 2 <- 1    each waits for its left neighbour, so without
    |                            ^      this they end one by one, each by the end of
    +-----------> 0 -------------+      the one before it

Gloo's listeners are known from the store: before two processes connect, each has put
the address of its own there, under "cpu:gloo/". Anyone who reaches the service can
write there, as they can write the addresses that Gloo connects to. What is read is only
compared with the addresses of this process's own connections.

Other kinds of collectives (NCCL, MPI) have nothing there, and are left alone.
"""

from __future__ import annotations

import struct

from hostcall import _native
from hostcall._jax.coordination import job_folder_bytes
from hostcall._jax.door import distributed as _distributed

_GLOO = "cpu:gloo/"
_LONGEST_ADDRESS = 4096  # bytes of a text in the store; Gloo's have about 200


def processes_at_service() -> int | None:
    """How many other processes are connected with the coordination service. None if
    this process does not have it, or if the system does not say.
    """
    port = _service_port()
    connections = _native.connections()
    if port is None or connections is None:
        return None
    own_ends = {local for _, local, _ in connections}
    count = 0
    for _, local, peer in connections:
        # This process's own client is connected too: both ends of that are here.
        if _port(local) == port and peer not in own_ends:
            count += 1
    return count


def close_collectives() -> int:
    """Closes the connections of this process that CPU collectives use, for both ends;
    returns how many these were. Collectives that wait for one raise.
    """
    stored = job_folder_bytes(_GLOO)
    listeners = [text for text in stored if len(text) <= _LONGEST_ADDRESS]
    closed = 0
    for descriptor, local, peer in _native.connections() or []:
        # One end of each is a listener: this process's own, or the other's.
        ends = (_start(local), _start(peer))
        if any(end in text for text in listeners for end in ends):
            closed += _native.shut_down(descriptor, local, peer)
    return closed


def _service_port() -> int | None:
    state = _distributed.global_state
    _, _, port = str(state.coordinator_address).rpartition(":")
    if state.service is None or not port.isdecimal():
        return None
    return int(port)


def _port(address: bytes) -> int:
    """The port of a sockaddr_in or a sockaddr_in6, whose layouts begin alike."""
    (port,) = struct.unpack_from("!H", address, 2)
    return int(port)


def _start(address: bytes) -> bytes:
    """Family, port and IP address, which have no padding behind them yet."""
    return address[:8] if len(address) <= 16 else address[:24]
