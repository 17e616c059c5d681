"""The primitive behind `hc.buffer_callback`."""
