"""`hc.bridge.torch`: a torch function or an nn.Module in JAX programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hostcall._core.errors import wrong
from hostcall._core.mistakes import check_function
from hostcall.bridge._library import needed


def torch(
    fn: Callable[..., Any] | None = None,
    *,
    result: Any = "infer",
    vmap_method: Any = None,
    derivatives: int = 1,
    lend: bool = True,
    timeout: float | None = None,
    executor: Any = None,
    name: str | None = None,
    nondiff: int | tuple[int, ...] = (),
) -> Any:
    """Makes a host function from a torch function or an nn.Module.

        f = hc.bridge.torch(lambda x: x * torch.sin(x))
        jax.jit(jax.grad(lambda x: f(x).sum()))(x)

        net = hc.bridge.torch(module)
        params = net.parameters()
        jax.grad(lambda params: loss(net(params, x)))(params)

    Args:
        fn: a function of tensors (and pytrees of them, and static objects, which reach
            it as they are) that returns a tensor or a pytree of tensors; or an
            nn.Module, which takes a dict of its parameters as its first argument. It
            runs on the CPU, or moves its tensors to a GPU itself. It must be pure: it
            returns the same results for the same arguments (a Dropout in train mode
            does not) and keeps nothing. It may write to its arguments, and then gets
            copies. Without it, `torch` returns a decorator.
        result: what `fn` returns. "infer" finds the shapes with torch's fake tensors
            when a program is traced, which computes nothing; if `fn` can't run on those
            (a value decides what it does), it is run on zeros. Otherwise as in
            `hc.host`; then nothing shows whether `fn` writes to its arguments, so it
            always gets copies.
        vmap_method: as in `hc.call`; or "torch": the batch is one host call of
            torch.func.vmap(fn), and so is a derivative of it.
        derivatives: the highest order of derivatives. 0: none. 1: by torch autograd,
            with its graph on the host between the forward and the backward pass. n:
            also derivatives of derivatives; each order computes the forward pass again.
        lend: True: tensors are views of XLA's memory, which `fn` must not keep. False:
            they are copies.
        timeout: as in `hc.host`.
        executor: as in `hc.host`.
        name: the function's name in messages and traces.
        nondiff: positions of arguments without a derivative. Integers have none.

    Returns:
        A `HostFunction`, which is called with arrays. The one of a module is called
        with `(params, *args)`, and has `parameters()` and `buffers()`, dicts of name ->
        array. Parameters and buffers that the dict leaves out are the module's own,
        without a derivative. The module is copied, and the copy shares its tensors: it
        stays in train or eval mode as it was, and what it writes to its buffers is
        lost.

    Raises:
        PackageError: torch is not installed.
        SpecError: an option, or an argument of a call, is wrong; or with
            result="infer", `fn` fails on zeros when a program is traced.
        DerivativeError: a derivative of higher order than `derivatives`.
        EscapeError: `fn` kept a tensor that it was lent.
        ResultError: as in `hc.call`; or `fn` wrote to an argument when it ran but not
            when its shapes were found. The argument has then been changed.
        Otherwise as `hc.call`: `hc.reraise()` raises what `fn` raised.

    Under transformations:
        jit, scan, cond, while_loop, remat, shard_map: as a pure `hc.call`.
        vmap: `vmap_method`. Rows of a backward pass run one by one, except with
            "torch".
        grad, vjp, jacrev: one forward call, which keeps the graph, and one backward
            call, for the wanted arguments. With "torch", and above order 1, the
            backward call runs forward too.
        jvp, jacfwd: torch.func.jvp, value and tangent in one call. torch runs it on one
            thread at a time; others wait.
        hessian and higher orders: with derivatives=2 and more.
        torch.no_grad in `fn` stops reverse mode but not forward mode, as in torch;
        x.detach() stops both. Complex derivatives follow JAX's convention; torch's is
        its conjugate.

    Cost: that of `hc.call`, and 2 to 3 us per tensor in and out. Arguments are copied
    only by a forward pass that keeps them, and for a function that writes to them (or a
    module that writes to its own buffers); results are copied once. A 64-bit result
    becomes 32-bit outside of JAX's 64-bit mode.

    Source: torch.func, torch.autograd.grad, the DLPack protocol.
    """
    options = dict(locals())  # the arguments, as long as there is no other local
    del options["fn"]
    if fn is None:
        return functools.partial(torch, **options)
    needed("torch", "torch")
    shown = name or check_function(fn, "hc.bridge.torch(fn)").name
    options["advice"] = _advice(shown, derivatives)
    if lend not in (False, True):
        raise wrong("lend", f"`{shown}`", "True or False", lend)
    from hostcall.bridge._torch.host_function import make

    # A function on another thread could outlive the memory that it was lent.
    options["lend"] = lend and timeout is None and vmap_method != "parallel"
    return make(fn, shown, **options)


def _advice(shown: str, derivatives: object) -> str:
    """Refuses a wrong derivatives=; returns what errors advise who wants one more."""
    if type(derivatives) is not int or derivatives < 0:
        wanted = "the highest order of derivatives, 0 for none"
        raise wrong("derivatives", f"`{shown}`", wanted, derivatives)
    return (
        f"`{shown}` was made with derivatives={derivatives}. Write hc.bridge.torch"
        f"(fn, derivatives={derivatives + 1}), or keep the derivative out with"
        " jax.lax.stop_gradient on its arguments"
    )
