"""What a program for a GPU needs, where JAX starts no GPU."""

from __future__ import annotations


def test_without_a_driver_the_cpu_works_and_gpus_are_refused(run_python):
    out = run_python(
        """
        import jax.numpy as jnp, hostcall as hc
        from hostcall._engine import targets
        assert hc.call(lambda x: x + 1, jnp.float32(0), jnp.float32(1)) == 2
        try:
            targets.prepare_for_cuda()
        except hc.errors.HostcallError as error:
            print(error)
        """,
        env={"HOSTCALL_CUDA_DRIVER": "/no/such/libcuda.so"},
    ).stdout
    assert "the CUDA driver can't be opened" in out
    assert "HOSTCALL_CUDA_DRIVER" in out
