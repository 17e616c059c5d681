"""`hc.host`: a Python function with its rules.

    host         `host`, which makes one
    function     HostFunction: what the user holds, and calls
    results      what `result=` may say
    rules        what the user gave to the def* methods, checked
    calls        one way of calling a HostFunction: which rule serves which derivative
    pairs        the derivative where both modes may have rules
    linear       Jacobians applied, linear functions transposed
    trees        arguments and results, flat and whole
    parts        the host code that `hc.call` runs, with trees put together and checked
    residuals    what a forward rule leaves on the host for its backward rule
    differences  derivatives by finite differences
    primitive    the three primitives, which know no rule; with them batching and
                 derivatives

Why this is not a `jax.custom_jvp`: that has one rule for both directions, and
`jax.custom_vjp` has no forward one. A function here may have both, so the choice falls
when JAX has decided which it wants: see `primitive`.
"""
