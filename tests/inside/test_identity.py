"""What tells calls apart that live programs make: `identity`."""

from hostcall._core.callback import CallSpec
from hostcall._core.identity import identity
from hostcall._core.options import CallOptions
from hostcall._core.source import Place, inspect_callable
from hostcall._core.spec import Opaque, Results, Template


def spec_of(fn, known=None, options=CallOptions()):
    template = Template.flat(None)
    results = Results.flat((), ())
    place = Place("train.py", 12, "step")
    return CallSpec(Opaque(fn), template, results, (), options, place, known=known)


def test_what_a_face_knows_of_a_function_tells_no_two_calls_apart():
    """It follows from the function: a face that has looked makes the same call."""
    known = inspect_callable(print)
    looked = spec_of(print, known)
    assert looked == spec_of(print)
    assert hash(looked) == hash(spec_of(print))
    assert identity(looked) == identity(spec_of(print))
    assert looked.facts == spec_of(print).facts


def test_all_else_that_a_call_has_tells_it_apart():
    assert identity(spec_of(print)) != identity(spec_of(repr))
    ordered = CallOptions(order="ordered")
    assert identity(spec_of(print)) != identity(spec_of(print, options=ordered))
