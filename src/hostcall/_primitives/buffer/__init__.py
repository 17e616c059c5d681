"""The primitive behind `hc.buffers.buffer_callback`."""
