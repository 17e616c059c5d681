"""Snapshots that go through a job's store, which anyone may have written to."""

import os
import pickle

import pytest

import hostcall as hc
from hostcall._api.object.snapshot_bytes import decode, encode

WHOLE = {
    "batch": (("x", 4), 3),
    "objects": {(0, 1): b"one", (2, 0): b""},
    "waiting": {(1, 1): b"two"},
}


def test_a_snapshot_comes_back():
    assert decode(encode(WHOLE), "it") == WHOLE
    empty = {"batch": (), "objects": {(): b"state"}}
    assert decode(encode(empty), "it") == {**empty, "waiting": {}}
    assert decode(encode({"error": "E: text"}), "it") == {"error": "E: text"}


class Evil:
    def __reduce__(self):
        return os._exit, (1,)


GOOD = encode(WHOLE)
FOREIGN = {
    "a pickle": pickle.dumps(Evil()),
    "nothing": b"",
    "cut": GOOD[:-1],
    "cut in its head": GOOD[:20],
    "a length": b"\xff" * 8 + GOOD[8:],
    "a size below 0": GOOD.replace(b"3]", b"-3]", 1),
    "a size that is no number": GOOD.replace(b", 0]]", b',""]]', 1),
    "deep": (10**6).to_bytes(8, "little") + b"[" * 10**6,
    "a list": (2).to_bytes(8, "little") + b"[]",
    "no text": (8).to_bytes(8, "little") + b"\xff" * 8,
}


@pytest.mark.parametrize("case", FOREIGN)
def test_bytes_that_no_process_wrote(case):
    with pytest.raises(
        hc.errors.HostcallError, match="was not written by a process"
    ) as caught:
        decode(FOREIGN[case], "save() of `env`, process 1")
    assert caught.value.code == "hc-process"
