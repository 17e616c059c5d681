"""hostcall's JAX primitives, one a folder, always in one order."""
