"""`hostcall.testing`: for the tests of programs that call the host.

check    runs a HostFunction and its rules against each other
Report   what `check` found: true where nothing failed
Check    one line of a report
collect  gathers what tagged taps are given, as arrays
"""

from hostcall._api.collect import collect
from hostcall._host_function.check.report import Check, Report, check

__all__ = ["Check", "Report", "check", "collect"]
