"""`hc.host`: a Python function with its rules.

    host              `host`, which makes one
    function          HostFunction: what the user holds and calls
    result_specs      what `result=` may say
    rules             what the user gave to the def* methods, as data
    site              one call of a HostFunction in a program: which rule serves which
                      derivative, Jacobians, linear functions
    exchanges         what goes out to the user's code and what comes back, for each
                      kind of rule
    rule_call         host code, in a program and when it runs
    in_jax            rules in JAX code, while a program is traced
    trees             arguments and results, flat and as trees
    sendable          what may run in another process
    residuals         what a forward rule leaves on the host for its backward rule
    differences       derivatives by finite differences
    difference_error  how wrong a difference is, for `check`
    check             `hc.testing.check`: rules against differences
    primitives        the two primitives, which know none of the user's rules

Why is this not a `jax.custom_jvp`? That has one rule for both modes, and
`jax.custom_vjp` has no forward rule. A HostFunction may have a rule for each mode, so
the choice must wait until JAX has decided which mode it wants: see `primitives`.
"""
