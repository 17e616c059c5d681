"""The primitives behind the drop-ins for JAX's own callbacks, one for each of JAX's."""
