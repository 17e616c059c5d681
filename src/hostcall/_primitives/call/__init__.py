"""The call primitive: a host function with results.

    primitive.py   the primitive, eager evaluation, abstract evaluation, derivatives
    batching.py    what vmap makes of it
    lowering.py    what the compiler gets

Operands are the arrays, `where` before them if there is one; everything static is in
one parameter, `params`.
"""
