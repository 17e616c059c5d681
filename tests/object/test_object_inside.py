"""hc.Object: an interrupt behind any instruction of a call."""

from __future__ import annotations


def test_ctrl_c_leaves_no_object_locked(run_python):
    """An interrupt may come behind any instruction, also where a lock is taken."""
    run_python(
        """
        import signal, threading
        import numpy as np, jax, jax.numpy as jnp
        import hostcall as hc
        class Count:
            n = 0
            def step(self):
                self.n += 1
                return np.float32(self.n)
        F32 = jax.ShapeDtypeStruct((), jnp.float32)
        count = hc.Object(Count, methods={"step": F32})
        def again(signum, frame):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, again)
        interrupts = 0
        while interrupts < 500:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + interrupts % 7))
                while True:
                    count._group.call(((), ()), "step()", lambda each: each.step())
            except KeyboardInterrupt:
                interrupts += 1
        got = []
        thread = threading.Thread(target=lambda: got.append(count.step()))
        thread.start()
        thread.join(60)
        assert len(got) == 1
        """
    )
