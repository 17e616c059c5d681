"""Notices a process of the job that dies without a word.

The idea: each process holds a TCP connection to the next one, in a ring. When a process
ends, however it ends, its kernel closes its connections, and the process before it
reads the end of the stream at once. Heartbeats in Python would be later, and wrong: a
process whose function holds the GIL for a minute would seem dead. If the network is
cut, the kernels' own keepalive packets end the connection, after `_SILENT` seconds.

Any set of processes that died has one before it in the ring that lives, unless all
died. So somebody always notices, and tells the others (peers.py).

A connection begins with a word that only the job's processes know, in both directions:
the store has it beside the address. So a server that happens to listen at an address is
not taken for a process, and a stranger not for the process before. After that nothing
is read but `_BYE`, which a process sends before it ends as it should. The listening
socket is on the address by which this process reaches the job's coordination service,
as Gloo's is.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

import jax

from hostcall import _jax

logger = logging.getLogger("hostcall")

ADDRESSES = "hostcall/ring/"  # in the job's store

_BYE = b"bye"
_HELLO = 5.0  # seconds that the other side has to say the word
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
        self._answered = False  # whether the next process has said the word
        self._rank = rank
        self._word = secrets.token_hex(16)

    def listen(self) -> None:
        """Opens the listening socket, and says in the job's store where it is."""
        host = _own_address(_jax.job_host())
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        server.setblocking(False)
        self._server = server
        address = f"{host} {server.getsockname()[1]} {self._word}"
        _jax.job_put(f"{ADDRESSES}{self._rank}", address, overwrite=True)

    @property
    def is_joined(self) -> bool:
        return self._after is not None

    def join(self) -> bool:
        """Connects to the next process, if that has said where it is."""
        after = _connect(self.next, _SILENT)
        if after is None:
            return False
        after.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            after.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
            after.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY)
            after.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TIMES)
        # Not answered yet: the next one's thread may be about to connect to us.
        self._after, self._answered = after, False
        return True

    def wait(self, seconds: float | None) -> str | None:
        """Waits for `wake`, for the time, or for the next process's end.

        Returns:
            "died": the next process has ended without a word. "bye": it has ended as it
            should. "stranger": something else is at its address. None: none of these.
        """
        reads = [s for s in (self._wake, self._server, self._after) if s is not None]
        # Not `select`, which takes no descriptor above 1023.
        poll = select.poll()
        for one in reads:
            poll.register(one, select.POLLIN)
        found = {fd for fd, _ in poll.poll(None if seconds is None else 1e3 * seconds)}
        ready = [one for one in reads if one.fileno() in found]
        if self._wake in ready:
            self._wake.recv(4096)
        if self._server is not None and self._server in ready:
            # The other one is gone again, or no descriptor is left.
            with contextlib.suppress(OSError):
                self._accept(self._server.accept()[0])
        if self._after is None or self._after not in ready:
            return None
        return self._heard(self._after)

    def _accept(self, before: socket.socket) -> None:
        """Keeps a connection of another process of the job; closes any other."""
        self._before = [one for one in self._before if _is_open(one)]
        before.settimeout(_HELLO)
        try:
            known = _received(before, len(self._word)) == self._word.encode()
            if known:
                before.sendall(self._word.encode())
        except OSError:
            known = False
        if known:
            self._before.append(before)
        else:
            before.close()

    def _heard(self, after: socket.socket) -> str | None:
        """What the next process said: the word first, then the end."""
        try:
            if not self._answered:
                after.settimeout(_HELLO)
                address = _jax.job_get(f"{ADDRESSES}{self.next}") or ""
                word = address.split()[-1:]
                said = _received(after, len(self._word))
                if word == [said.decode(errors="replace")]:
                    self._answered = True
                    return None
                ended = "stranger"
            else:
                ended = "bye" if after.recv(len(_BYE)) else "died"
        except OSError:  # reset, or the keepalive had no answer
            ended = "died" if self._answered else "stranger"
        self._after = None
        after.close()
        return ended

    def take_leave(self, process: int) -> None:
        """Connects to another process, which then sees when this one has ended.

        The socket is never closed: the kernel does that after all else.
        """
        farewell = _connect(process, 1.0)
        if farewell is not None:
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
        if self._server is not None:  # one that has connected, and was not heard yet
            with contextlib.suppress(OSError):
                self._accept(self._server.accept()[0])
        for before in self._before:
            with contextlib.suppress(OSError):  # that process has ended already
                before.send(_BYE)
        self._close()

    def after_fork(self) -> None:
        """Closes the child's copies: they would hide the end of its parent."""
        for farewell in _farewells:
            os.close(farewell)
        _farewells.clear()
        self._close()

    def _close(self) -> None:
        own = (self._wake, self._waker, self._server, self._after, *self._before)
        for one in own:
            if one is not None:
                one.close()


_farewells: list[int] = []  # file descriptors


def _connect(process: int, seconds: float) -> socket.socket | None:
    """A connection to another process; None if it has not said where it is."""
    address = _jax.job_get(f"{ADDRESSES}{process}")
    if address is None:
        return None
    host, port, word = address.split()
    made = socket.create_connection((host, int(port)), timeout=seconds)
    made.sendall(word.encode())
    return made


def _received(other: socket.socket, size: int) -> bytes:
    """So many bytes; fewer if the other side has closed."""
    got = b""
    while len(got) < size:
        part = other.recv(size - len(got))
        if not part:
            break
        got += part
    return got


def _is_open(before: socket.socket) -> bool:
    try:
        return before.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _own_address(host: str) -> str:
    """The address of this machine on the way to `host`; sends nothing."""
    found = _address_towards(host)
    alone = host in ("localhost", "::1") or host.startswith("127.")
    if alone or not ipaddress.ip_address(found).is_loopback:
        return found
    # Debian gives a machine's own name the address 127.0.1.1, which no other machine
    # can reach. The way to anywhere else has an address that the others can.
    with contextlib.suppress(OSError):  # there is none: no other machine comes
        return _address_towards(_ELSEWHERE)
    return found


_ELSEWHERE = "192.0.2.1"  # reserved for documentation, so it is nobody's


def _address_towards(host: str) -> str:
    failed: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:  # such as IPv6 on a machine without it
            failed = error
    raise failed or OSError(f"{host} has no address")


def run(
    ring: Ring,
    stopping: threading.Event,
    post: Callable[[], object],
    died: Callable[[], object],
) -> None:
    """Joins the ring and watches it, and posts messages, until `stopping` is set.

    Args:
        ring: the place of this process.
        stopping: set, and `ring.wake` called, when this should return.
        post: writes the messages that are to be sent; called after each `ring.wake`.
        died: called when the next process has died without a word.
    """
    pause, begun = 0.0, time.monotonic()
    try:
        ring.listen()
    except (OSError, jax.errors.JaxRuntimeError) as error:
        logger.warning(
            "hostcall can't notice at once that a process of the job died: %s", error
        )
        pause = -1.0
    while not stopping.is_set():
        post()
        if not ring.is_joined and pause >= 0:
            try:
                if not ring.join():
                    # The next process may start to use hostcall soon, or never.
                    pause = min(max(0.1, (time.monotonic() - begun) / 10), 5.0)
            except (OSError, jax.errors.JaxRuntimeError) as error:
                _unwatched(ring.next, error)
                pause = -1.0
        try:
            ended = ring.wait(None if ring.is_joined or pause < 0 else pause)
        except Exception as error:  # this thread also posts, so it must go on
            _unwatched(ring.next, error)
            ended, pause = None, -1.0
            stopping.wait(0.5)
        if ended is not None:
            pause = -1.0
        if ended == "stranger":
            _unwatched(ring.next, "another program is at its address")
        if ended == "died" and not stopping.is_set():
            died()
    post()
    ring.close()


def _unwatched(process: int, why: object) -> None:
    logger.warning(
        "hostcall won't notice at once that process %d of the job dies: %s",
        process,
        why,
    )
