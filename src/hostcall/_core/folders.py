"""Who can write to a folder. Whoever can runs code in a process that unpickles it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_to_others(folder: str | os.PathLike[str]) -> str:
    """What lets another user write to a folder, or put another in its place; "" if
    nothing does. Looks at owners and modes, not at access lists.
    """
    path = Path(os.path.realpath(folder))
    for each in (path, *path.parents):
        try:
            found = each.stat()
        except FileNotFoundError:  # it will be made, in the next one
            continue
        # Root trusts every owner: a container's mounts belong to a user outside it.
        if found.st_uid not in (0, os.geteuid()) and os.geteuid():
            return f"{each} belongs to another user"
        # In a folder with the sticky bit, such as /tmp, others can't replace ours.
        if each != path and found.st_mode & stat.S_ISVTX:
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"all users can write to {each}"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
            return f"the group of {each} can write to it"
    return ""


def _is_private(group: int) -> bool:
    """Whether the group is this user's own, as most Linux systems make one for each."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = group in (0, user.pw_gid) and set(found.gr_mem) <= {user.pw_name}
    return own and found.gr_name in ("root", user.pw_name)
