"""Which groups may write to the folder of a cache, on machines that are not this one."""

from __future__ import annotations

import grp
import pwd

import pytest

from hostcall._host_function import kept


@pytest.mark.parametrize(("group", "private"), [(1000, True), (2000, False)])
def test_a_group_that_has_only_the_users_name(group, private, monkeypatch):
    """Others may have it as their primary group, which lists no members."""
    user = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: grp.struct_group(("ann", "", gid, []))
    )
    assert kept._is_private(group) == private
