"""In the text of a program each host call depends on the one before it, by a token.

What runs on a CPU does not show that: XLA's schedule mostly keeps the order of the text
where nothing asks for it. So this looks at the operations themselves.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcall as hc

RESULT = jax.ShapeDtypeStruct((), np.int32)


def nothing(number):
    del number


def same(number):
    return number


KINDS = {
    "call": lambda i, order: hc.call(nothing, None, i, order=order),
    "result": lambda i, order: hc.call(same, RESULT, i, order=order),
    "tap": lambda i, order: hc.tap(nothing, i, order=order),
    "drop-in": lambda i, order: hc.io_callback(
        nothing, None, i, ordered=order[0] == "o"
    ),
}
ORDERS = ["ordered", "unordered"]


def straight(do, x):
    do(x)


def in_scan(do, x):
    lax.scan(lambda c, i: (do(i), (c, None))[1], x, jnp.arange(3))


def in_while(do, x):
    lax.while_loop(lambda i: i < 2, lambda i: (do(i), i + 1)[1], x)


def in_branches(do, x):
    def step(c, i):
        do(i)
        lax.cond(i > 0, lambda: do(i + 1), lambda: None)
        do(i + 2)
        return c, None

    lax.scan(step, x, jnp.arange(3))


def in_function(do, x):
    inner = jax.jit(lambda i: (do(i), i + 1)[1])
    do(x)
    inner(x)
    do(x + 1)
    inner(x + 1)


PLACES = {
    "straight": straight,
    "scan": in_scan,
    "while": in_while,
    "branches": in_branches,
    "function": in_function,
}


class Text:
    """The operations of a lowered program."""

    def __init__(self, lowered):
        body = lowered.compiler_ir("stablehlo").body
        self.functions = {op.name.value: op for op in body.operations}

    @staticmethod
    def blocks(op):
        return [block for region in op.regions for block in region.blocks]

    def inner(self, op):
        """The operations inside, those of the functions that it calls too."""
        for block in self.blocks(op):
            for member in block.operations:
                yield member
                yield from self.inner(member.operation)
        if op.operation.name == "func.call":
            yield from self.inner(self.functions[op.attributes["callee"].value])

    def has_call(self, op):
        return any(
            member.operation.name == "stablehlo.custom_call"
            and "hostcall" in str(member.attributes["call_target_name"])
            for member in (op, *self.inner(op))
        )

    def needs(self, op):
        """All operations whose results it uses, directly or not."""
        found = []
        todo = [op]
        while todo:
            user = todo.pop()
            # What is inside of a branch uses values from outside without naming them.
            for inside in (user, *self.inner(user)):
                for value in inside.operation.operands:
                    # None for an argument of a block, which no operation has made.
                    maker = getattr(value.owner, "operation", None)
                    if maker is not None and maker not in found:
                        found.append(maker)
                        todo.append(maker)
        return found

    def chains(self):
        """Of each block, the operations with host calls, as far as there are several."""
        blocks = [self.blocks(op) for op in self.functions.values()]
        todo = list(itertools.chain(*blocks))
        while todo:
            members = [op.operation for op in todo.pop().operations]
            todo += itertools.chain(*map(self.blocks, members))
            calls = [op for op in members if self.has_call(op)]
            if len(calls) > 1:
                yield calls


def check(program):
    text = Text(jax.jit(program).lower(jnp.int32(0)))
    chains = list(text.chains())
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            assert before in text.needs(after), f"{after}\n\ndoes not need\n\n{before}"
    return chains


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, KINDS)], ids="-".join)
def test_each_call_needs_the_one_before_it(kinds, place):
    for orders in itertools.product(ORDERS, ORDERS):

        def do(i, orders=orders):
            # None of the numbers comes from another call.
            for kind, order in zip(kinds, orders, strict=True):
                KINDS[kind](i, order)

        assert check(lambda x, do=do: (PLACES[place](do, x), x + 1)[1])


def test_calls_around_a_loop_and_in_it():
    def program(x):
        KINDS["tap"](x, "unordered")
        in_scan(lambda i: KINDS["tap"](i, "unordered"), x)
        KINDS["call"](x, "unordered")
        in_while(lambda i: KINDS["result"](i, "ordered"), x)
        KINDS["tap"](x, "unordered")

    assert max(map(len, check(program))) == 5
