"""The call primitive: a host function with results.

    make.py        the way in: binds a call that a face has checked and flattened
    primitive.py   the primitive, eager evaluation, abstract evaluation, derivatives
    batching.py    the batching rule
    lowering.py    the lowering to one custom call

The operands are the call's arrays, with the mask of `where=` in front if there is one.
Everything static is in one parameter, `params`.
"""
