"""Refuses to be imported where the engine can't work, before anything heavy is."""

from __future__ import annotations

import ctypes

_main = ctypes.pythonapi.PyInterpreterState_Main
_here = ctypes.pythonapi.PyInterpreterState_Get
_main.restype = _here.restype = ctypes.c_void_p

if _here() != _main():
    raise ImportError(
        "hostcall can't be used in a sub-interpreter: threads of XLA's enter Python"
        " through the main one. Import it in the main interpreter, or use a process"
    )
