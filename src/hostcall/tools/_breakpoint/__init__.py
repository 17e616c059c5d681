"""The parts of `hc.breakpoint`: the user's lines, and frames that show them."""
