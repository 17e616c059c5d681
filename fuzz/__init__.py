"""Fuzzers of the code that reads foreign data: `make fuzz`, CONTRIBUTING.md."""
