"""Fuzzers of the code that reads foreign data: `make fuzz`, docs/design/quality.md."""
