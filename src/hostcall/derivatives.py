"""`hostcall.derivatives`: taps that see derivatives.

    tap_tangent    taps the tangent of a value in forward-mode derivatives
    tap_cotangent  taps its cotangent in reverse-mode derivatives

Rules for the derivatives of a host function belong to `hostcall.HostFunction`.
"""

from hostcall._api.tap_derivatives import tap_cotangent, tap_tangent

__all__ = ["tap_cotangent", "tap_tangent"]
