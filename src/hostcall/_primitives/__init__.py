"""hostcall's JAX primitives: one folder each, with the same modules in each folder."""
