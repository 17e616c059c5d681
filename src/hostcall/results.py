"""`hostcall.results`: short forms of `result=` of `hostcall.host`.

like         result=like(0): the result is an array like argument 0
elementwise  result=elementwise: arguments broadcast to one floating array
same_tree    result=same_tree(0): the result is a pytree like argument 0
"""

from hostcall._host_function.result_specs import elementwise, like, same_tree

__all__ = ["elementwise", "like", "same_tree"]
