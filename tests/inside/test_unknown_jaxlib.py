"""A jaxlib newer than those whose host callbacks hostcall has been seen to enter."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("version", ["0.12.0", "0.13.0"])
def test_calls_go_through_jaxs_handler_in_known_versions_only(run_python, version):
    """The engine answers JAX's handler in a layout of XLA's, so a layout that may have
    changed is not guessed: calls are then made without the handler.
    """
    out = run_python(
        f"""
        import jax, jaxlib
        jaxlib.__version__ = {version!r}
        import jax.numpy as jnp, numpy as np, hostcall as hc
        from hostcall import _jax

        spec = jax.ShapeDtypeStruct((), np.float32)
        run = jax.jit(lambda x: hc.call(np.sqrt, spec, x))
        print(run(jnp.float32(9)), _jax.host_callback_handler() is None)
        """
    ).stdout
    assert out.split() == ["3.0", str(version == "0.13.0")]
