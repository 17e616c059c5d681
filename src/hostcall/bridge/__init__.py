"""Functions of other libraries, and of other devices, as functions of JAX programs.

    jax             a JAX function on another device than the program's
    scipy           solvers of JAX functions: root, minimize, least_squares
    torch           a torch function or nn.Module, differentiated by torch autograd
    value_and_grad  a function that returns its value and its gradient together

Each makes an `hc.typing.HostFunction`. It works in any JAX code, the other library
gives its derivatives, and `hc.testing.check` can test it. A library is imported only
when its bridge is used.

`_library` holds what several bridges share: functions whose derivatives are functions
of the same kind, made when JAX asks for them. `_scipy` and `_torch` are the inside of
two of them.
"""

from hostcall._core.gone import of_bridge as __getattr__  # noqa: F401
from hostcall.bridge import scipy
from hostcall.bridge._jax import on_device as jax
from hostcall.bridge._torch.bridge import torch
from hostcall.bridge._value_and_grad import value_and_grad

__all__ = ["jax", "scipy", "torch", "value_and_grad"]
