"""The parts of `hc.observe`: bad values, their origin, names, statistics, bars."""
