"""The tap primitive: `primitive` has it, `partitioned` the lowering of blocks.

`tangents` has two more primitives: identities that tap a tangent or a cotangent.
"""
