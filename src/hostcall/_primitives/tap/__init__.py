"""The tap primitive: `primitive` has its rules, `lowering` and `blocks` its lowerings.

`derivatives` has two more primitives: identities that tap a tangent or a cotangent.
"""
