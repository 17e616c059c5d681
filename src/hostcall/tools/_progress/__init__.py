"""The parts of `hc.progress`: checks, one bar, all bars, and how they are drawn."""
