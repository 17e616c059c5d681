"""A call between a failure and the refusal of further programs."""

from __future__ import annotations

import pytest

from hostcall import _jax
from hostcall._job.after_failure import Failures
from hostcall.errors import HostcallError


def test_a_call_that_was_dispatched_before_the_failure(monkeypatch):
    failures = Failures(send=print)
    call = failures.until_failure(abs)
    assert call(-1) == 1
    monkeypatch.setattr(_jax, "refuse_programs_across", lambda refusal: None)
    failures.failed("LookupError: no such row", announces=False)
    with pytest.raises(
        HostcallError, match="first failure was: LookupError: no such row"
    ):
        call(-1)
