"""The process's TCP connections: looking changes none, and only the named one closes."""

from __future__ import annotations

import os
import socket

from hostcall import _native


def pair():
    with socket.create_server(("localhost", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return mine, other


def listed(end):
    """The entry of a socket."""
    (found,) = (c for c in _native.connections() if c[0] == end.fileno())
    return found


def test_both_ends_are_listed_by_their_addresses():
    mine, other = pair()
    with mine, other:
        _, local, peer = listed(mine)
        assert listed(other)[1:] == (peer, local)
        assert int.from_bytes(local[2:4], "big") == mine.getsockname()[1]
        assert os.get_blocking(mine.fileno())


def test_what_is_no_connection_is_not_listed():
    mine, other = socket.socketpair()  # not TCP
    reads, writes = os.pipe()
    with mine, other, socket.create_server(("localhost", 0)) as server:
        numbers = {number for number, _, _ in _native.connections()}
        assert not numbers & {mine.fileno(), reads, writes, server.fileno()}
    os.close(reads)
    os.close(writes)


def test_a_connection_is_closed_only_between_its_two_addresses():
    mine, other = pair()
    third, fourth = pair()
    with mine, other, third, fourth:
        number, local, peer = listed(mine)
        # Its number may belong to another one by now.
        assert not _native.shut_down(third.fileno(), local, peer)
        assert not _native.shut_down(number, peer, local)
        assert not _native.shut_down(2**30, local, peer)
        for end, far in [(mine, other), (third, fourth)]:
            end.sendall(b"open")
            assert far.recv(10) == b"open"
        assert _native.shut_down(number, local, peer)
        assert other.recv(10) == b""
        assert mine.recv(10) == b""
        third.sendall(b"open")
        assert fourth.recv(10) == b"open"
