"""The functions of `hostcall.host_callback`."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcall import _jax
from hostcall._api.configure import configure
from hostcall._compat.outside_call import Unpacked, bind, raised
from hostcall._core.dispatched import failures_of_all
from hostcall._runtime import delivery

logger = logging.getLogger("hostcall.host_callback")

_QUEUE_BYTES = 256_000_000  # the flag's default, which leaves the limit as it is
_jax.define_old_flags(
    {
        "jax_host_callback_inline": False,
        "jax_host_callback_max_queue_byte_size": _QUEUE_BYTES,
        "jax_host_callback_ad_transforms": False,
        "jax_host_callback_outfeed": False,
    },
    'The page "From jax.experimental.host_callback" of hostcall says what it does.',
)


class CallbackException(Exception):
    """Raised by `barrier_wait` if callbacks raised; its cause is the last exception."""


TapFunctionException = CallbackException


def id_tap(
    tap_func: Callable[..., Any],
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    **kwargs: Any,
) -> Any:
    """Returns its argument, and calls `tap_func(arg, transforms)` on the host.

    The program does not wait for `tap_func`. On each device, taps are delivered in the
    order in which the program reaches them.

    Args:
        tap_func: gets `arg` with NumPy arrays, and the transformations that the tap
            has gone through, such as ("batch", {"batch_dims": ...}) for a vmap.
        arg: a pytree of arrays and numbers.
        result: a value to return instead of `arg`. It is not sent to the host.
        tap_with_device: calls `tap_func(arg, transforms, device=device)`.
        device_index: in a jitted program over sharded arrays, which device taps the
            whole value.
        **kwargs: refused.

    Returns:
        `arg`, or `result` if that is given.

    Raises:
        TypeError: other keywords are given, `tap_func` is not callable, or JAX does
            not accept a leaf. An exception of `tap_func` is logged, and raised by the
            next `barrier_wait`.

    Under transformations:
        vmap: one tap of the batch.
        jvp, grad: the primal values; if tangents are tapped (in a custom_jvp) and then
            transposed, the cotangents, with ("transpose", {}). With the flag
            jax_host_callback_ad_transforms, pairs of primals and tangents, with
            ("jvp", {}).
        remat: taps again where the value is recomputed.
        pmap, shard_map: each device taps its own values.
        jit over sharded arrays: once.

    Cost: that of `hostcall.tap`.

    Source: the documentation of jax.experimental.host_callback.
    """
    if kwargs:
        raise TypeError(
            "Support for **kwargs in ``id_tap`` has been removed. Instead, pre-apply"
            " keyword arguments, either by using a closure or by passing"
            " ``functools.partial(tap_func, **kwargs)``."
        )
    if _jax.old_flag("jax_host_callback_ad_transforms"):
        warnings.warn(
            "The flag jax_host_callback_ad_transforms exists for old programs. Use"
            " hostcall.derivatives.tap_tangent and tap_cotangent, which need no flag",
            FutureWarning,
            stacklevel=2,
        )
    for leaf in jax.tree.leaves(result):  # which go nowhere that would check them
        _jax.check_arg(leaf)
    _follow_queue_flag()
    out = bind(tap_func, arg, tap_with_device, device_index)
    return out if result is None else result


def id_print(
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    output_stream: Any = None,
    threshold: int | None = None,
    **kwargs: Any,
) -> Any:
    r"""`id_tap` with a function that prints.

    It prints one line with the sorted keywords, including `transforms` and `device`,
    and then `arg`, with arrays formatted by `numpy.array2string`.

    Args:
        arg: as in `id_tap`.
        result: as in `id_tap`.
        tap_with_device: prints the device too.
        device_index: as in `id_tap`.
        output_stream: each line goes to `output_stream.write(line + "\n")`; None
            for `print`.
        threshold: as in `numpy.array2string`.
        **kwargs: printed as `key: value`.

    Returns:
        As `id_tap`.

    Under transformations: as `id_tap`.

    Cost: that of `id_tap`; the worker of taps formats and prints.
    """
    printer = functools.partial(
        _print_tap_func, output_stream=output_stream, threshold=threshold, **kwargs
    )
    return id_tap(
        printer,
        arg,
        result=result,
        tap_with_device=tap_with_device,
        device_index=device_index,
    )


def call(
    callback_func: Callable[..., Any],
    arg: Any,
    *,
    result_shape: Any = None,
    call_with_device: bool = False,
    device_index: int = 0,
) -> Any:
    """Calls `callback_func(arg)` on the host, and returns its result to the program.

    Args:
        callback_func: gets `arg` with NumPy arrays, returns a pytree of arrays.
        arg: a pytree of arrays and numbers.
        result_shape: a pytree like the result, of numbers or of anything with `shape`
            and `dtype`; None or () for no result.
        call_with_device: calls `callback_func(arg, device=device)`.
        device_index: as in `id_tap`.

    Returns:
        What `callback_func` returned, as jax.Arrays.

    Raises:
        ValueError: `result_shape` does not describe shapes.
        NotImplementedError: under vmap and under differentiation. Give a rule with
            jax.custom_batching, jax.custom_jvp or jax.custom_vjp, or use
            `hostcall.call`.
        jax.errors.JaxRuntimeError: when the program runs and `callback_func` raises,
            or returns another structure, shape or dtype (TypeError in its text).
            `barrier_wait` raises too, and `hostcall.reraise()` gives the exception.

    Under transformations: vmap, jvp and grad are refused (above). It runs in jit, scan,
    while_loop, cond, shard_map and pmap, in the order of the program.

    Cost: that of `hostcall.call` with an effect.
    """
    _follow_queue_flag()
    described, result_tree = jax.tree.flatten(result_shape)
    try:
        avals = tuple(map(_aval, described))
    except (TypeError, ValueError, AttributeError):
        raise ValueError(
            "result_shape should be a pytree of values with structure matching the"
            " expected result of the callback function. The values must be either"
            " numeric scalars, or must have 'shape' and 'dtype' attributes. Got"
            f" {result_shape}"
        ) from None
    result = result_tree, avals
    return bind(callback_func, arg, call_with_device, device_index, result)


def _aval(described: Any) -> _jax.Aval:
    if isinstance(described, (bool, int, float, complex)):
        described = np.asarray(described)
    dtype = _jax.canonical_dtype(np.dtype(described.dtype))
    return _jax.ShapedArray(tuple(described.shape), dtype)


# --- Waiting ------------------------------------------------------------------------


def barrier_wait(logging_name: str | None = None) -> None:
    """Waits until all running programs have finished, and their callbacks too.

    Args:
        logging_name: a name for the log.

    Raises:
        CallbackException: callbacks have raised since the last call. Its text has the
            traceback of the last exception, which is its `__cause__`.
    """
    name = logging_name or ""
    logger.debug("barrier_wait[%s]: start", name)
    delivery.refuse_inside_a_tap("barrier_wait()")
    # It waits for the programs. What their callbacks raised is in `raised`.
    for failure in failures_of_all():
        logger.debug("barrier_wait[%s]: a program failed: %s", name, failure)
    logger.debug("barrier_wait[%s]: waiting for callbacks", name)
    delivery.flush()
    logger.debug("barrier_wait[%s]: done", name)
    with contextlib.suppress(IndexError):  # no callback has raised
        error, text = raised.pop()
        raise CallbackException(
            f"There were exceptions during callback processing. Last one was: {text}"
        ) from error


def stop_outfeed_receiver() -> None:
    """Waits for callbacks, as the old function did before it stopped their receiver.

    Here there is no receiver to stop, and no outfeed to free.
    """
    delivery.refuse_inside_a_tap("stop_outfeed_receiver()")
    delivery.flush()


def _follow_queue_flag() -> None:
    """Sets the limit of the tap queue from the old flag, if that has been set."""
    size = _jax.old_flag("jax_host_callback_max_queue_byte_size")
    if size != _QUEUE_BYTES:
        configure(tap_queue_bytes=size)


# --- Printing -----------------------------------------------------------------------

_print_lock = threading.Lock()  # keeps the lines of one value together


def _print_tap_func(
    arg: Any,
    transforms: Unpacked,
    *,
    device: _jax.Device | None = None,
    output_stream: Any = None,
    threshold: int | None = 1024,
    **kwargs: object,
) -> None:
    if transforms:
        # The old module's form: a name alone, if there is nothing to say beside it.
        named = [(name, params) if params else name for name, params in transforms]
        kwargs["transforms"] = named
    if device is not None:
        kwargs["device"] = device
    lines = []
    if kwargs:
        words = [f"{key}: {value}" for key, value in sorted(kwargs.items())]
        lines.append(" ".join(words))
    lines.append(str(_document(arg, threshold)))
    with _print_lock:
        for line in lines:
            if output_stream is None:
                print(line)
            else:
                output_stream.write(line + "\n")


def _document(value: object, threshold: int | None) -> _jax.Doc:
    """Formats a pytree with JAX's pretty printer: on one line if it fits."""
    pp = _jax.pretty_printer
    documents = []
    if isinstance(value, dict):
        brackets = "{}"
        for key, entry in sorted(value.items()):
            documents.append(pp.text(f"{key}=") + _document(entry, threshold))
    elif isinstance(value, (tuple, list)):
        brackets = "()" if isinstance(value, tuple) else "[]"
        documents = [_document(entry, threshold) for entry in value]
    elif isinstance(value, np.ndarray):
        return pp.text(np.array2string(value, threshold=threshold))
    else:
        return pp.text(str(value))
    opening = pp.text(f"{brackets[0]} ")
    closing = pp.text(f" {brackets[1]}")
    inner = pp.nest(2, pp.join(pp.brk(), documents))
    return pp.group(pp.concat([opening, inner, closing]))
