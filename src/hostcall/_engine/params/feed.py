"""The parameters of a feed's equation."""

from __future__ import annotations

from dataclasses import dataclass, field

from hostcall import _native
from hostcall._core.errors import LoadError
from hostcall._core.options import LOCAL_ONLY
from hostcall._engine.params.equation import CallParams
from hostcall._engine.placement import Placement
from hostcall._runtime.feeds import Stream


@dataclass(frozen=True, kw_only=True, repr=False)
class FeedParams(CallParams):
    """The parameters of one equation of the feed primitive.

    The function is the feed's `Stream`. The engine takes items from the stream's ring,
    and calls the stream only to wait for one.

    Attributes:
        devices: with sharding=, the ordinals of the devices, in the order of the ring's
            lanes; empty if all devices take from one lane.
    """

    devices: tuple[int, ...] = field(default=(), metadata=LOCAL_ONLY)  # type: ignore[misc]

    name = "feed"
    runs_along_axes = False

    @property
    def stays(self) -> str:  # type: ignore[override]
        why = "it is a feed with sharding=, which names devices"
        return why if self.devices else ""

    def native_kind(self, placement: Placement) -> _native.Kind:
        stream = self.callback.function
        if not isinstance(stream, Stream):  # the program comes from a file
            raise LoadError(
                f"hostcall: the program takes items of the feed {self.callback.name!r},"
                " and what is registered here under its name is no hc.feed"
            )
        # The engine copies items of the ring's size into the results' memory. The last
        # result is the scalar that says whether there was an item.
        # A file may have any avals, or none.
        sizes = [aval.size * aval.dtype.itemsize for aval in self.avals[:-1]]
        if sizes != stream.sizes or self.avals[-1].shape:
            raise LoadError(
                f"hostcall: the program takes items of {sizes} bytes from the feed"
                f" {self.callback.name!r}, and the items of the feed that is registered"
                f" here have {stream.sizes}. Give the feed the spec= that it had where"
                " the program was exported, or count its version= up"
            )
        if placement.called_by_other_process:  # the items are taken there
            return super().native_kind(placement)
        return _native.FeedKind(ring=stream.ring, devices=self.devices)
