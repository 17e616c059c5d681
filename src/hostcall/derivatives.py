"""`hostcall.derivatives`: taps that see derivatives.

    tap_tangent    taps the tangent of a value where it is differentiated forward
    tap_cotangent  taps its cotangent where it is differentiated in reverse

Rules for the derivatives of a host function belong to `hostcall.HostFunction`.
"""

from hostcall._api.tap import tap_cotangent, tap_tangent

__all__ = ["tap_cotangent", "tap_tangent"]
