"""`hc.host`: a Python function with its rules.

    host              `host`, which makes one
    function          HostFunction: what the user holds and calls
    method            a HostFunction as a method of a class
    results           what `result=` may say
    rules             what the user gave to the def* methods, checked
    calls             one way of calling a HostFunction: which rule serves which
                      derivative
    pairs             the derivative if both modes may have rules
    linear            Jacobians applied, linear functions transposed
    trees             arguments and results, flat and as trees
    parts             the host code that a call runs: its avals, fills and options
    steps             what runs inside that host code: trees put together, results
                      checked
    residuals         what a forward rule leaves on the host for its backward rule
    differences       derivatives by finite differences
    difference_error  how wrong those are
    check             `hc.testing.check`: rules against differences
    primitive         the three primitives, which know no rule
    batching          their batching rules
    derivatives       their JVP, transpose, partial evaluation and dead code

Why is this not a `jax.custom_jvp`? That has one rule for both modes, and
`jax.custom_vjp` has no forward rule. A HostFunction may have a rule for each mode, so
the choice must wait until JAX has decided which mode it wants: see `primitive`.
"""
