"""`hc.host`: a Python function with its rules.

    host              `host`, which makes one
    function          HostFunction: what the user holds and calls
    results           what `result=` may say
    rules             what the user gave to the def* methods, checked
    site              one call of a HostFunction: which rule serves which derivative;
                      linear functions and their transposes
    derivative        the derivative if both modes may have rules; Jacobians
    trees             arguments and results, flat and as trees
    function_code     the function or a rule in Python: how it becomes a call, and what
                      runs around it
    traced            the rules in JAX code, which take the same steps
    sendable          what may run in another process
    residuals         what a forward rule leaves on the host for its backward rule
    differences       derivatives by finite differences
    difference_error  how wrong those are
    check             `hc.testing.check`: rules against differences
    primitive         the three primitives, which know none of the user's rules
    batching          their batching rules

Why is this not a `jax.custom_jvp`? That has one rule for both modes, and
`jax.custom_vjp` has no forward rule. A HostFunction may have a rule for each mode, so
the choice must wait until JAX has decided which mode it wants: see `primitive`.
"""
