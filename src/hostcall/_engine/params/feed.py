"""The parameters of a feed's equation."""

from __future__ import annotations

from dataclasses import dataclass

from hostcall import _native
from hostcall._engine.params.call import CallParams
from hostcall._runtime.feeds import Stream


@dataclass(frozen=True, repr=False)
class FeedParams(CallParams):
    """The parameters of one equation of the feed primitive.

    The function is the feed's `Stream`. The engine takes items from the stream's ring,
    and calls the stream only to wait for one.

    Attributes:
        devices: for a sharded feed, the ordinals of the devices, in the order of the
            ring's lanes; empty for a feed whose devices all take from one lane.
    """

    devices: tuple[int, ...] = ()

    def fed(self) -> _native.FeedSettings | None:
        stream = self.callback.function
        assert isinstance(stream, Stream)
        return _native.FeedSettings(ring=stream.ring, devices=self.devices)
