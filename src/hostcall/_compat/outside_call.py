"""The primitive behind `hostcall.host_callback`, with the old module's semantics.

One primitive serves taps, which return their arguments, and calls. Instead of being
transformed, it records each transformation: a batched tap is one tap of the whole
batch, and its function gets the list of transformations. When it is lowered, it becomes
a tap or a call of this library.
"""

from __future__ import annotations

import collections
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import numpy as np

from hostcall import _jax
from hostcall._api.call import call
from hostcall._api.tap import tap
from hostcall._core import errors, failures
from hostcall._core.errors import counted
from hostcall._core.mistakes import refuse_coroutines
from hostcall._core.order import ORDERED, effects_with
from hostcall._core.source import name_of
from hostcall._core.spec import Opaque
from hostcall._primitives.eager import seen_before
from hostcall._runtime import context

logger = logging.getLogger("hostcall.host_callback")

Arrays: TypeAlias = list[jax.Array]
# The transformations as the user's function gets them.
Unpacked: TypeAlias = tuple[tuple[str, dict[str, Any]], ...]

outside_call_p = _jax.Primitive("outside_call")
outside_call_p.multiple_results = True


@dataclass(frozen=True)
class Outside:
    """The parameters of one equation, and the callable that the engine runs for it.

    Attributes:
        fn: the user's function.
        identity: True for a tap, which returns its arguments; False for a call.
        with_device: whether the function takes the device as a keyword.
        arg_tree: the treedef of its argument.
        result_tree, avals: the treedef of the result; the avals of a call's.
        device_index: in a multi-device program, the index of the device that calls.
        transforms: (name, ...) of each transformation, in the order of application.
    """

    fn: Opaque
    identity: bool
    with_device: bool
    arg_tree: _jax.TreeDef
    result_tree: _jax.TreeDef
    avals: tuple[_jax.Aval, ...] = ()
    device_index: int = 0
    transforms: tuple[tuple[Any, ...], ...] = ()

    def with_transform(self, *transform: object) -> Outside:
        return replace(self, transforms=(*self.transforms, transform))

    @property
    def is_pair(self) -> bool:
        """Whether it taps (primals, tangents): half of its arrays are either."""
        return self.identity and self.transforms[-1:] == (("jvp",),)

    def of_half(self) -> Outside:
        """Such a tap of the primals alone, or of the tangents."""
        primals_tree, _ = self.arg_tree.children()  # both are alike
        return replace(self, arg_tree=primals_tree)

    def of_primals(self) -> Outside:
        """Such a tap of the primals alone, as it was before the jvp."""
        return replace(self.of_half(), transforms=self.transforms[:-1])

    @property
    def unpacked(self) -> Unpacked:
        """The transformations as the user's function gets them."""
        unpacked: list[tuple[str, dict[str, Any]]] = []
        for name, *details in self.transforms:
            # Only a batch has details: the axis of each array.
            unpacked.append((name, {"batch_dims": details[0]} if details else {}))
        return tuple(unpacked)

    # --- On the host: the engine calls it with the arrays of one equation ------------

    @property
    def __name__(self) -> str:
        return name_of(self.fn.value)

    def __call__(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...] | None:
        current = context.current()
        return self.run(arrays, None if current is None else current.device)

    def run(
        self, arrays: Sequence[np.ndarray], device: _jax.Device | None
    ) -> tuple[np.ndarray, ...] | None:
        """Calls the user's function, and keeps its exception for `barrier_wait`.

        Only a call raises the exception too, since its program then lacks a result.
        """
        fn = self.fn.value
        try:
            arg = self.arg_tree.unflatten(arrays)
            message = "Outside call invoking call_func %s, device=%s, transforms=%s"
            logger.debug(message, fn, device, self.unpacked)
            device_option = {"device": device} if self.with_device else {}
            if self.identity:
                fn(arg, self.unpacked, **device_option)
                return None
            return self._checked(fn(arg, **device_option))
        except Exception as error:
            self._note(error)
            if self.identity:
                return None
            raise

    def _note(self, error: Exception) -> None:
        """Keeps an exception for `barrier_wait`, and logs it."""
        text = failures.summary(error)
        # A user's exception may raise another one where its text is made.
        with failures.beside_a_failure("writing its traceback"):
            text = traceback.format_exc()
        raised.append((error, text))
        with failures.beside_a_failure("logging it"):
            # The texts of the module that JAX removed.
            logger.error("Outside call %s threw exception %s.", self.fn.value, error)
            message = "Postponing exception raised in callback function: %s"
            logger.error(message, text)

    def _checked(self, value: object) -> tuple[np.ndarray, ...]:
        """The leaves of a call's result."""
        leaves, tree = jax.tree.flatten(value)
        if tree != self.result_tree:
            raise self._mismatch("pytree", self.result_tree, tree)
        arrays = tuple(map(_jax.to_host, leaves))
        expected = _avals_of(self.avals)
        returned = _avals_of(arrays)
        # As lists: in a tree a class of the user's may have no __eq__.
        if returned != expected:
            raise self._mismatch(
                "abstract values", tree.unflatten(expected), tree.unflatten(returned)
            )
        return arrays

    def _mismatch(self, compared: str, expected: object, returned: object) -> TypeError:
        return TypeError(
            f"Callback func {self.fn.value} should have returned a result with"
            f" {compared} {expected} but returned {returned}"
        )


def _avals_of(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


# The last exception of a callback, with its traceback's text. A deque: callbacks of
# several threads may fail at once.
raised: collections.deque[tuple[Exception, str]] = collections.deque(maxlen=1)


# --- impl ----------------------------------------------------------------------------


def _impl(*operands: jax.Array, params: Outside) -> Arrays:
    """An eager call or tap."""
    if _jax.old_flag("jax_host_callback_inline"):
        arrays = [_jax.to_host(operand) for operand in operands]
        device = jax.devices()[params.device_index]
        results = params.run(arrays, device)
        outs = operands if params.identity else results
        return list(map(jax.numpy.asarray, outs or ()))
    # An eager call that comes again is compiled: it then costs less each time.
    if not params.identity and seen_before(params, params.fn.value):
        return _jax.apply_primitive(outside_call_p, *operands, params=params)  # type: ignore[no-any-return]
    return _emit(params, list(operands))


def _emit(params: Outside, xs: Arrays, devices: Sequence[_jax.Device] = ()) -> Arrays:
    """Emits the tap or call. `devices` are those of a multi-device program."""
    if devices and params.device_index >= len(devices):
        text = (
            f"hostcall: device_index={params.device_index}, but the program runs on"
            f" {counted(len(devices), 'device')}"
        )
        raise errors.SpecError(text, code="hc-device")
    on = devices[params.device_index] if devices else "once"
    if not params.identity:
        results = call(params, params.avals, *xs, order="ordered", on=on)
        return list(results)
    tap(params, *xs, order="ordered", on=on)
    return [x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in xs]


# --- abstract eval -------------------------------------------------------------------


def _abstract_eval(
    *avals: _jax.Aval, params: Outside
) -> tuple[list[_jax.Aval], frozenset[_jax.Effect]]:
    results = avals if params.identity else params.avals
    return list(results), effects_with(ORDERED)


# --- batching ------------------------------------------------------------------------


def _only_taps(rules: str, params: Outside) -> None:
    if not params.identity:
        text = f"{rules} implemented only for id_tap, not for call."
        raise NotImplementedError(text)


def _batch(
    operands: Arrays, dims: _jax.Dims, *, params: Outside
) -> tuple[Arrays, _jax.Dims]:
    _only_taps("batching rules are", params)
    batched = params.with_transform("batch", tuple(dims))
    return outside_call_p.bind(*operands, params=batched), dims


# --- JVP, transpose ------------------------------------------------------------------


def _jvp(primals: Arrays, tangents: Arrays, *, params: Outside) -> tuple[Arrays, ...]:
    _only_taps("JVP rule is", params)
    if not _jax.old_flag("jax_host_callback_ad_transforms"):
        return outside_call_p.bind(*primals, params=params), tangents
    # One tap of (primals, tangents). It has an array for each tangent, zeros too.
    dots = list(map(_jax.instantiate_zeros, tangents))
    pair = jax.tree_util.treedef_tuple((params.arg_tree, params.arg_tree))
    tap_of_pair = replace(params.with_transform("jvp"), arg_tree=pair)
    outs = outside_call_p.bind(*primals, *dots, params=tap_of_pair)
    n = len(primals)
    return outs[:n], outs[n:]


def _partial_eval(
    trace: _jax.Trace, *tracers: _jax.Tracer, params: Outside
) -> list[_jax.Tracer]:
    """Splits a tap of (primals, tangents), if only the primals are known.

    It becomes two taps: one of the primals now, and one of both in the linear program.
    """

    def default(operands: Sequence[_jax.Tracer], params: Outside) -> list[_jax.Tracer]:
        params_of_jax = {"params": params}
        outs = trace.default_process_primitive(outside_call_p, operands, params_of_jax)
        return list(outs)

    n = len(tracers) // 2
    are_known = list(map(_jax.is_known, tracers))
    are_primals_known = params.is_pair and all(are_known[:n])
    if not are_primals_known or all(are_known):
        return default(tracers, params)
    primals = default(tracers[:n], params.of_primals())
    pair = default(tracers, params)
    return [*primals, *pair[n:]]


def _transpose(
    cotangents: Arrays, *operands: jax.Array, params: Outside
) -> list[jax.Array | None]:
    _only_taps("differentiation rules are", params)
    cts = list(map(_jax.instantiate_zeros, cotangents))
    tapped = params.with_transform("transpose")
    if params.is_pair:  # only the tangents are linear, so only they are tapped
        n = len(operands) // 2
        dots = outside_call_p.bind(*cts[n:], params=tapped.of_half())
        outs = [*cts[:n], *dots]
    else:
        outs = outside_call_p.bind(*cts, params=tapped)
    # JAX wants a cotangent for the linear operands, and None for the others.
    return [
        out if _jax.is_undefined_primal(operand) else None
        for out, operand in zip(outs, operands, strict=True)
    ]


# --- Under remat ---------------------------------------------------------------------


def _remat(
    _: object, unknown: list[bool], inst: list[bool], eqn: _jax.JaxprEquation
) -> object:
    """Taps in the forward pass, and again where its values are recomputed.

    A rule of JAX's for partial evaluation. It gets, for each operand, whether its value
    is unknown and whether the second program has it, and returns: the equation of the
    first program, or None; that of the second; for each result, whether it is unknown,
    and whether the second program has it; what the second needs of the first.
    """
    params = eqn.params["params"]
    n = len(eqn.outvars)
    is_unknown = any(unknown)
    first = None if is_unknown else eqn
    unknown_outs = [is_unknown] * n
    half = n // 2
    if params.is_pair and is_unknown and not any(unknown[:half]):
        # The values are known, and are tapped alone; their tangents are not.
        first = eqn.replace(
            params={"params": params.of_primals()},
            invars=eqn.invars[:half],
            outvars=eqn.outvars[:half],
        )
        unknown_outs[:half] = [False] * half
    residuals = []
    for operand, is_in_second in zip(eqn.invars, inst, strict=True):
        if not is_in_second and not _jax.is_literal(operand):
            residuals.append(operand)
    return first, eqn, unknown_outs, [True] * n, residuals


# --- Lowering, registration ----------------------------------------------------------


def _lower(
    ctx: _jax.LoweringContext, *operands: _jax.Value, params: Outside
) -> list[_jax.Value]:
    program = _jax.program_of(ctx)
    devices: Sequence[_jax.Device] = ()
    if program.is_partitioned:
        devices = program.devices or ()

    def emit(*xs: jax.Array) -> Arrays:
        return _emit(params, list(xs), devices)

    return _jax.lower_by(ctx, emit, *operands)


outside_call_p.def_impl(_impl)
outside_call_p.def_effectful_abstract_eval(_abstract_eval)
_jax.batchers[outside_call_p] = _batch
_jax.jvps[outside_call_p] = _jvp
_jax.transposes[outside_call_p] = _transpose
_jax.partial_eval_by_trace[outside_call_p] = _partial_eval
_jax.partial_eval_rules[outside_call_p] = _remat
_jax.register_lowering(outside_call_p, _lower)


def bind(
    fn: Callable[..., object],
    arg: Any,
    with_device: bool,
    device_index: int,
    result: tuple[_jax.TreeDef, tuple[_jax.Aval, ...]] | None = None,
) -> Any:
    """Binds the equation that calls `fn`: a tap, or with `result` a call."""
    if not callable(fn):
        raise TypeError(f"Expected a callable value, got {fn}")
    refuse_coroutines(fn)
    operands, tree = jax.tree.flatten(arg)
    for operand in operands:
        _jax.check_arg(operand)
    out_tree, avals = result or (tree, ())  # a tap returns its argument
    params = Outside(
        fn=Opaque(fn),
        identity=result is None,
        with_device=with_device,
        arg_tree=tree,
        result_tree=out_tree,
        avals=avals,
        device_index=device_index,
    )
    outs = outside_call_p.bind(*operands, params=params)
    return out_tree.unflatten(outs)
