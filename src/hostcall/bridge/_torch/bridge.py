"""`hc.bridge.torch`: a torch function, or an nn.Module, in JAX programs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from hostcall._core.arguments import check_function
from hostcall._core.errors import SpecError


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
    """Makes a torch function, or an nn.Module, a function of JAX programs.

        f = hc.bridge.torch(lambda x: x * torch.sin(x))
        jax.jit(jax.grad(lambda x: f(x).sum()))(x)

        net = hc.bridge.torch(module)
        params = net.parameters()
        jax.grad(lambda params: loss(net(params, x)))(params)

    Args:
        fn: a function of tensors (pytrees of them, and static objects, which reach it
            as they are) that returns a tensor or a pytree of tensors; or an nn.Module,
            which gets a dict of its parameters as a first argument. It runs on the
            CPU, or brings its tensors to a GPU itself. It must be pure: the same
            arguments, the same results (a Dropout in train mode is not), and nothing
            kept. It may write to its arguments: it then gets copies. Without it, a
            decorator.
        result: what `fn` returns. "infer": its shapes are found with torch's fake
            tensors when a program is traced, which computes nothing; where they can't
            go through (a value decides what is done), by a run on zeros. Else as in
            `hc.host`; then nobody sees whether `fn` writes to its arguments, and it
            always gets copies.
        vmap_method: as in `hc.call`; or "torch": the batch is one host call, of
            torch.func.vmap(fn), and so is that of a derivative.
        derivatives: to which order. 0: none. 1: by torch autograd; its graph stays on
            the host between the forward and the backward pass. n: of derivatives too.
            Each order computes the forward pass again.
        lend: tensors are views of XLA's memory, which `fn` must not keep. False: they
            are copies.
        timeout: as in `hc.call`.
        executor: likewise.
        name: of the function in messages and traces.
        nondiff: positions of arguments without a derivative. Integers have none.

    Returns:
        A `HostFunction`, to be called with arrays. That of a module is called with
        (params, *args), and has `parameters()` and `buffers()`: dicts of name -> array.
        Those that the dict leaves out are the module's own, without a derivative. The
        module is copied, its tensors are not: whether it trains is as it was then; what
        it writes to its buffers is lost.

    Raises:
        ModuleNotFoundError: torch is not installed.
        SpecError: something here, or in a call, is written wrong; with result="infer",
            `fn` fails on zeros when a program is traced.
        DerivativeError: a derivative of higher order than `derivatives`.
        EscapeError: `fn` kept a tensor that it was lent.
        ResultError: as in `hc.call`; and `fn` wrote to an argument when it ran, and not
            when its shapes were found: the argument is changed.
        Otherwise as `hc.call`: what `fn` raises comes out by `hc.reraise()`.

    Under transformations:
        jit, scan, cond, while_loop, remat, shard_map: as a pure `hc.call`.
        vmap: `vmap_method`. Rows of a backward pass run one by one, but for "torch".
        grad, vjp, jacrev: one call forward, which keeps the graph, one backward, for
            those arguments that are wanted. With "torch", and above order 1, the
            backward call runs forward too.
        jvp, jacfwd: torch.func.jvp, value and tangent in one call. torch admits one
            thread at a time: others wait.
        hessian and higher orders: with derivatives=2 and more.
        torch.no_grad in `fn` stops reverse mode and not forward mode, as in torch;
        x.detach() stops both. Complex derivatives are in JAX's convention, not in
        torch's, its conjugate.

    Cost: that of `hc.call`, and 2 to 3 us a tensor in and out. Arguments are not
    copied, but by a forward pass that keeps them; results are copied once. A 64-bit
    result becomes 32-bit outside of JAX's 64-bit mode.

    Source: torch.func, torch.autograd.grad, the DLPack protocol.
    """
    if fn is None:
        options = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(torch, **options)
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(
            "hostcall: hc.bridge.torch needs PyTorch, which is not installed. Type"
            ' pip install "hostcall[torch]"',
            name="torch",
        )
    shown = name or check_function(fn, "hc.bridge.torch(fn)")
    if type(derivatives) is not int or derivatives < 0:
        raise SpecError(
            f"hostcall: derivatives= of `{shown}` should be the highest order, 0 for"
            f" none, got {derivatives!r}"
        )
    if lend not in (False, True):
        raise SpecError(
            f"hostcall: lend= of `{shown}` should be True or False, got {lend!r}"
        )
    from hostcall.bridge._torch.function import make

    return make(
        fn,
        result=result,
        vmap_method=vmap_method,
        derivatives=derivatives,
        # On another thread a function could outlive what it was lent.
        lend=lend and timeout is None and vmap_method != "parallel",
        timeout=timeout,
        executor=executor,
        name=name,
        nondiff=nondiff,
    )
