"""`hostcall.derivatives`: taps that see derivatives, and derivatives without a rule.

    tap_tangent        taps the tangent of a value in forward-mode derivatives
    tap_cotangent      taps its cotangent in reverse-mode derivatives
    finite_difference  approximates derivatives that have no rule

Rules for the derivatives of a host function belong to `hostcall.typing.HostFunction`.
"""

from hostcall._api.tap_derivatives import tap_cotangent, tap_tangent
from hostcall._host_function.differences import finite_difference

__all__ = ["finite_difference", "tap_cotangent", "tap_tangent"]
