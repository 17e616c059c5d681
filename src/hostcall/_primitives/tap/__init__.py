"""The tap primitive: `primitive` has its rules, `lowering` what the compiler gets.

`derivatives` has two more: identities that tap a tangent, and a cotangent.
"""
