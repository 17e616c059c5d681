"""What each face does under each transformation and with each dtype: "ok" or a hole."""

from __future__ import annotations

from dataclasses import dataclass

from programs import DEVICES

KEY = "key<fry>"  # of an array of keys


@dataclass(frozen=True)
class Hole:
    """A cell that is not "ok".

    Attributes:
        starts: how its outcome starts (test_matrix.py): a code of hostcall, "again" if
            host code sees all values twice, "numbers" if it sees those of keys, or the
            type and text of JAX's own error.
        shown: in the page's table.
        why: for the reader of the page, with what to do.
    """

    starts: str | tuple[str, ...]
    shown: str
    why: str


OK = Hole("ok", "ok", "")

NO_RULE = Hole(
    "hc-derivative",
    "`hc-derivative`",
    "The host function has no derivative. Use a pure `hc.host` with a rule, or put"
    " `jax.custom_jvp` or `custom_vjp` around the call: those columns are ok.",
)
NO_RULE_JAX = Hole(
    "ValueError: {} callbacks do not support JVP",
    "ValueError",
    "JAX's callbacks have no derivatives, and their drop-ins raise JAX's error. Use"
    " `hc.host` with a rule.",
)
TWICE = Hole(
    "again",
    "twice",
    "A pure function runs again in the backward pass, like everything there."
    " Calls that are not pure keep their results instead.",
)
TWICE_DEBUG = Hole(
    "again",
    "twice",
    "The backward pass computes the argument again, and JAX's debug callbacks run with"
    ' it. `hc.tap` and `hc.print` run once; a tap with `remat="repeat"` runs again.',
)
TWICE_LOOP = Hole(
    "again",
    "twice",
    "JAX runs a `while_loop` twice if only some of its carried values are differentiated"
    " (`linearize`, and the forward pass of `checkpoint`), and its callbacks with it."
    " Other calls run once, or are refused if the derivative needs their results.",
)
PURE_LOOP = Hole(
    ("ok", "again"),
    "ok or twice",
    "JAX splits this `while_loop` in two, and may run a pure function again in the"
    " second one (0.10 does). With an `order=` it runs once.",
)
NO_REMAT = Hole(
    "NotImplementedError: Effects not supported in ",
    "NotImplementedError",
    "JAX refuses callbacks with effects under `jax.checkpoint`. `hc.call` with an"
    " `order` works.",
)
NO_ROWS = Hole(
    "ValueError: Cannot `vmap` ordered IO callback.",
    "ValueError",
    "JAX refuses `vmap` of an ordered `io_callback`, and so does the drop-in."
    " `hc.call` with an `order` runs the rows in row order.",
)
ONE_DEVICE = Hole(
    "ValueError: The following ordered effects are not supported for more than 1",
    "ValueError",
    "JAX refuses ordered debug callbacks over several devices. `hc.tap` and `hc.print`"
    ' with `order="ordered"` keep the order on each device.',
)
NO_NAME = Hole(
    "hc-export",
    "`hc-export`",
    "The drop-ins stay in their process, like JAX's callbacks. `hc.call`, `hc.tap` and"
    " `hc.print` leave it, if their functions are registered (`hc.register`).",
)
NO_KEYS = Hole(
    "TypeError: Cannot interpret 'key<fry>' as a data type",
    "TypeError",
    "JAX's callbacks can't return keys. Return `jax.random.key_data`, and wrap it in"
    " the program (`jax.random.wrap_key_data`). `hc.call` takes and returns keys.",
)
RAW_KEYS = Hole(
    "numbers",
    "numbers",
    "A key arrives as its numbers (`jax.random.key_data`), as in JAX's own callbacks."
    " `hc.tap` and `hc.print` get keys.",
)

_DERIVATIVES = ("grad", "jvp", "linearize", "jvp of while_loop")
_WORDS = {
    "hc.buffers.buffer_callback": "Buffer",
    "hc.buffers.native": "Buffer",
    "hc.pure_callback": "Pure",
    "hc.io_callback": "IO",
}


def of_transformation(face: str, order: str, name: str) -> Hole:
    """The outcome of a face with an order under a transformation."""
    debug = face.startswith("hc.debug.")
    if name in _DERIVATIVES:
        if face in _WORDS:
            starts = NO_RULE_JAX.starts.format(_WORDS[face])
            return Hole(starts, NO_RULE_JAX.shown, NO_RULE_JAX.why)
        if (face, order) == ("hc.host", "pure"):
            return OK
        return NO_RULE if face in ("hc.call", "hc.host", "hc.Object") else OK
    if name.endswith("beside a while_loop"):
        if face == "hc.io_callback" and name.startswith("remat"):
            return NO_REMAT
        if debug or face == "hc.io_callback":
            return TWICE_LOOP
        return PURE_LOOP if order == "pure" and face != "hc.tap_through" else OK
    if name.startswith("remat"):
        if face == "hc.io_callback":
            return NO_REMAT
        if debug:
            return TWICE_DEBUG
        return TWICE if order == "pure" and face != "hc.tap_through" else OK
    if name == "vmap" and (face, order) == ("hc.io_callback", "ordered"):
        return NO_ROWS
    if name in DEVICES and debug and order == "ordered":
        return ONE_DEVICE
    if name == "export" and (debug or face in _WORDS):
        return NO_NAME
    return OK


def of_dtype(face: str, dtype: str) -> Hole:
    """The outcome of a face with values of a dtype."""
    if dtype != KEY:
        return OK
    if face.startswith("hc.debug."):
        return RAW_KEYS
    return NO_KEYS if face in _WORDS else OK


def of_both(face: str, order: str, name: str, dtype: str) -> Hole:
    """The outcome under a transformation: an error comes first."""
    typed = of_dtype(face, dtype)
    transformed = of_transformation(face, order, name)
    return typed if typed is NO_KEYS or transformed is OK else transformed
