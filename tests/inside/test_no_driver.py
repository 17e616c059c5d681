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


def test_programs_for_amds_gpus_need_no_driver_of_nvidias(run_python):
    """jaxlib calls the platform of their client "gpu" too. A program for the CPU, whose
    lowering is told that it is for them, goes through JAX's own callback as theirs do.
    """
    out = run_python(
        """
        import types
        import jax, numpy as np
        import hostcall as hc
        from hostcall import _jax

        known = _jax.program_of
        def there(ctx):
            client = types.SimpleNamespace(platform="gpu")
            how = {"client": client, "by_ordinal": {}, "local": None}
            return known(ctx)._replace(platforms=("rocm",), **how)
        _jax.program_of = there

        def tapped(x):
            hc.tap(lambda v: print("tapped", v), x)
            hc.print("printed {}", x)
            return hc.call(lambda v: v + 1, x, x)
        called = jax.jit(tapped)(np.float32(1))
        hc.barrier()
        print("called", called)
        """,
        env={"HOSTCALL_CUDA_DRIVER": "/no/such/libcuda.so"},
    ).stdout
    assert sorted(out.splitlines()) == ["called 2.0", "printed 1.0", "tapped 1.0"]
