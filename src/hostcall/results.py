"""`hostcall.results`: short forms of `result=` of `hostcall.host`.

like         result=like(0): the result is an array like argument 0
signature    result=signature("(n)->(k)", sizes={"k": 3}): as a text, for hc.call too
elementwise  result=elementwise: arguments broadcast to one floating array
same_tree    result=same_tree(0): the result is a pytree like argument 0
"""

from hostcall._core.result_rules import elementwise, like, same_tree
from hostcall._core.said_results import signature

__all__ = ["elementwise", "like", "same_tree", "signature"]
