"""Notices a process of the job that dies without a word.

The idea: each process holds a TCP connection to the next one, in a ring. When a process
ends, however it ends, its kernel closes its connections, and the process before it
reads the end of the stream at once. Heartbeats in Python would be later, and wrong: a
process whose function holds the GIL for a minute would seem dead. If the network is
cut, the kernels' own keepalive packets end the connection, after `_SILENT` seconds.

Any set of processes that died has one before it in the ring that lives, unless all
died. So somebody always notices, and tells the others (peers.py).

Nothing is read from a connection but `_BYE`, which a process sends before it ends as it
should. The listening socket is on the address by which this process reaches the job's
coordination service, as Gloo's is; whoever connects learns when this process ends, and
nothing else.
"""

from __future__ import annotations

import contextlib
import select
import socket

from hostcall import _jax

ADDRESSES = "hostcall/ring/"  # in the job's store

_BYE = b"bye"
_IDLE, _EVERY, _TIMES = 5, 5, 4  # the keepalive's, in seconds
_SILENT = _IDLE + _EVERY * _TIMES


class Ring:
    """The place of one process in the ring.

    One thread uses it; `wake`, `take_leave` and `those_before` any thread may call.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.next = (rank + 1) % size
        self._wake, self._waker = socket.socketpair()
        self._server: socket.socket | None = None
        self._before: list[socket.socket] = []
        self._after: socket.socket | None = None
        self._rank = rank

    def listen(self) -> None:
        """Opens the listening socket, and says in the job's store where it is."""
        host = _own_address(_jax.job_host())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        server.setblocking(False)
        self._server = server
        address = f"{host} {server.getsockname()[1]}"
        _jax.job_put(f"{ADDRESSES}{self._rank}", address, overwrite=True)

    @property
    def is_joined(self) -> bool:
        return self._after is not None

    def join(self, seconds: float) -> bool:
        """Connects to the next process, if that has said where it is."""
        address = _jax.job_get(f"{ADDRESSES}{self.next}", seconds)
        if address is None:
            return False
        host, port = address.split()
        self._after = socket.create_connection((host, int(port)), timeout=_SILENT)
        self._after.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            self._after.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
            self._after.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY)
            self._after.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TIMES)
        return True

    def wait(self, seconds: float | None) -> str | None:
        """Waits for `wake`, for the time, or for the next process's end.

        Returns:
            "died": the next process has ended without a word. "bye": it has ended as it
            should. None: neither.
        """
        reads = [s for s in (self._wake, self._server, self._after) if s is not None]
        ready, _, _ = select.select(reads, [], [], seconds)
        if self._wake in ready:
            self._wake.recv(4096)
        if self._server is not None and self._server in ready:
            with contextlib.suppress(BlockingIOError):  # the other one is gone again
                self._before.append(self._server.accept()[0])
        if self._after is None or self._after not in ready:
            return None
        try:
            said = self._after.recv(len(_BYE))
        except OSError:  # reset, or the keepalive had no answer
            said = b""
        self._after.close()
        self._after = None
        return "bye" if said else "died"

    def take_leave(self, process: int) -> None:
        """Connects to another process, which then sees when this one has ended.

        The socket is never closed: the kernel does that after all else.
        """
        address = _jax.job_get(f"{ADDRESSES}{process}", 0.05)
        if address is not None:
            host, port = address.split()
            farewell = socket.create_connection((host, int(port)), timeout=1.0)
            _farewells.append(farewell.detach())

    def those_before(self) -> int:
        """How many of the processes that have connected to this one still live."""
        return sum(map(_is_open, list(self._before)))

    def wake(self) -> None:
        """Ends a `wait`."""
        with contextlib.suppress(OSError):  # closed: nobody waits any more
            self._waker.send(b"x")

    def close(self) -> None:
        """Says that this process ends as it should, and closes all sockets."""
        for before in self._before:
            with contextlib.suppress(OSError):  # that process has ended already
                before.send(_BYE)
        own = (self._wake, self._waker, self._server, self._after, *self._before)
        for one in own:
            if one is not None:
                one.close()


_farewells: list[int] = []  # file descriptors


def _is_open(before: socket.socket) -> bool:
    try:
        return before.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _own_address(host: str) -> str:
    """The address of this machine on the way to `host`; sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
