"""The tap primitive: `primitive` has it, `partitioned` the lowering of blocks, and
`repeated` the eager taps that need no plan of their own.

`tangents` has two more primitives: identities that tap a tangent or a cotangent.
"""
