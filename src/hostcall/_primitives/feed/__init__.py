"""The feed primitive: the next item of a feed, and whether there was one.

Its operands are the mask of `where=`, if there is one, and then what `rows=` gave. The
latter have no elements: they only tell vmap that each row wants an item of its own.
"""
