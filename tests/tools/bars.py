"""Bars that record what they are told, and a terminal to read drawn bars from."""

from __future__ import annotations

import io

import pyte


class Recorded:
    """A bar with tqdm's methods."""

    def __init__(self, desc, total, unit, initial):
        self.desc, self.total, self.unit, self.initial = desc, total, unit, initial
        self.n, self.postfix = initial, ""
        self.shown: list[int] = []
        self.restarts = 0
        self.leave, self.is_closed = True, False

    def update(self, n):
        assert not self.is_closed
        self.n += n
        self.shown.append(self.n)

    def set_postfix_str(self, text, refresh):
        assert not refresh
        self.postfix = text

    def reset(self):
        self.restarts += 1
        self.n = 0

    def close(self):
        assert not self.is_closed
        self.is_closed = True


class Screen:
    """A factory of bars for `hc.progress(bar=...)`, with all that it has made."""

    def __init__(self):
        self.bars: list[Recorded] = []

    def __call__(self, *, desc, total, unit, initial):
        self.bars.append(Recorded(desc, total, unit, initial))
        return self.bars[-1]

    @property
    def ends(self):
        """(the last number shown, whether closed, whether left) of each bar."""
        return [(bar.n, bar.is_closed, bar.leave) for bar in self.bars]


class Terminal(io.StringIO):
    """What tqdm takes for a terminal."""

    def isatty(self):
        return True

    def lines(self):
        """What a terminal shows after all that was written."""
        screen = pyte.Screen(120, 24)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        lines = [line.rstrip() for line in screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines
