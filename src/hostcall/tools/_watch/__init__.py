"""The parts of `hc.watch`: what its errors say."""
