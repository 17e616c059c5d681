"""hostcall's JAX primitives: a folder for each, and what their lowerings share.

call, drop_in, tap    primitives; `primitive` has a folder's rules, `lowering` its
                      custom call
buffer, feed          primitives whose calls are lowered as `call`
eager      calls outside of compiled programs
emit       tokens, slots, JAX's own callback
blocks     host code on each device of a partitioned program
across     the results of one process's call, brought to all processes
together   calls that fail on all devices of a program if one fails
"""
