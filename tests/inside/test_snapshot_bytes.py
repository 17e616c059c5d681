"""Snapshots that go through a job's store, which anyone may have written to."""

import json
import os
import pickle

import pytest

import hostcall as hc
from hostcall._api.object.everywhere import decode, encode

WHOLE = {
    "batch": (("x", 4), 3),
    "objects": {(0, 1): b"one", (2, 0): b""},
    "waiting": {(1, 1): b"two"},
}


def test_a_snapshot_comes_back():
    assert decode(encode(WHOLE), "it", 0) == WHOLE
    empty = {"batch": (), "objects": {(): b"state"}}
    assert decode(encode(empty), "it", 0) == {**empty, "waiting": {}}
    with pytest.raises(hc.errors.HostcallError, match="it failed in process 1: E: tex"):
        decode(encode({"error": "E: text"}), "it", 1)


class Evil:
    def __reduce__(self):
        return os._exit, (1,)


GOOD = encode(WHOLE)


def changed(**new):
    return json.dumps({**json.loads(GOOD), **new}).encode()


FOREIGN = {
    "a pickle": pickle.dumps(Evil()),
    "nothing": b"",
    "cut": GOOD[:-1],
    "no states": b'{"batch":[]}',
    "more": changed(more=1),
    "a size that is no number": changed(batch=[""]),
    "an axis without a name": changed(batch=[[3, 4]]),
    "an index that is no tuple": changed(objects=[[0, ""]]),
    "a state that is no text": changed(objects=[[[0], 1]]),
    "a state that is not base64": changed(waiting=[[[0], "{}"]]),
    "states in a dict": changed(objects={"0": ""}),
    "an error that is no text": b'{"error":[]}',
    "deep": b"[" * 10**6,
    "a list": b"[]",
    "no text": b"\xff" * 8,
}


@pytest.mark.parametrize("case", FOREIGN)
def test_bytes_that_no_process_wrote(case):
    with pytest.raises(
        hc.errors.HostcallError, match="was not written by a process"
    ) as caught:
        decode(FOREIGN[case], "save() of `env`", 1)
    assert caught.value.code == "hc-process"
