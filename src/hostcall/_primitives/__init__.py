"""hostcall's JAX primitives: a file or folder for each, and what they share.

call, drop_in, tap    primitives, with all their rules and their lowering
buffer, feed          primitives whose calls are lowered as `call`
batching     the batching rule of calls
eager        calls outside of compiled programs
lowering     the way into a lowering, tokens, slots, the custom call
kept_alive   what an executable keeps alive, and why it can't leave the process
some_axes    calls in a shard_map that is manual over some mesh axes only
through_jax  the lowering on platforms that only JAX's own callback serves
refused      the errors about what XLA can't compile
outcome      the results or the failure of a call, brought to all devices
blocks       host code on each device of a partitioned program
make         the way in for the faces
"""
