"""`hostcall.typing`: the types of what hostcall's functions return, for annotations.

HostFunction  what `host` returns: a function with batching and derivatives
Feed          what `feed` returns
Exported      what `export` and `load` return: the program, and what it needs
Current       what `current` returns
Place         a line of the user's program, as `current().place` and errors name it
"""

from hostcall._api.feed.feed import Feed
from hostcall._core.source import Place
from hostcall._export.export import Exported
from hostcall._host_function.function import HostFunction
from hostcall._runtime.context import Current

__all__ = ["Current", "Exported", "Feed", "HostFunction", "Place"]
