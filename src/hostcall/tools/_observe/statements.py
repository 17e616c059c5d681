"""What the syntax tree of a file says of its statements: what each assigns to.

The frames of an equation say which expressions were evaluated when it was traced
(`_jax/user_lines.py`). The syntax tree says which statement these belong to.
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from hostcall._jax.user_lines import SourceLine

Span: TypeAlias = tuple[int, int, int, int]  # line, column, end line, end column


class Target(NamedTuple):
    """A name that a statement assigns to.

    Attributes:
        name: such as `loss` or `self.loss`.
        part: which part of the value, by the indices of the tuples that it is in; ():
            it is all. None: that can't be told, behind a `*`.
        span: of its expression.
    """

    name: str
    part: tuple[int, ...] | None
    span: Span


# Functions that are part of a statement. From Python 3.12 on comprehensions are none.
_PARTS = "<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"


def targets(line: SourceLine) -> list[Target]:
    """What the statement of this frame assigns to. What is inside of a `:=` belongs to
    that, and to the statement only if it is all of its value.
    """
    code = parsed_file(line.file)
    assigned: list[Target] = []
    if not line.function.endswith(_PARTS):
        around = [s for s in code.statements if is_within(line, span_of(s))]
        assigned = targets_of(max(around, key=span_of)) if around else []
    for span, walrus in code.walruses:
        if is_within(line, walrus.span):
            assigned = [outer for outer in assigned if outer.span == span] + [walrus]
    return [*assigned, *(x for target in assigned for x in _unpacked(line, target))]


def _unpacked(line: SourceLine, target: Target) -> Iterator[Target]:
    """What later statements assign the parts of a name to, as `loss, grads = out`."""
    function = _function_of(line)
    if function is None or target.part is None:
        return
    for statement in _own_statements(function):
        is_of_name = (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Name)
            and statement.value.id == target.name
        )
        if not is_of_name or span_of(statement) <= target.span:
            continue
        for unpacked in targets_of(statement):
            if unpacked.part:
                part = (*target.part, *unpacked.part)
                yield Target(unpacked.name, part, target.span)


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
_LOOPS = (
    *(ast.For, ast.AsyncFor, ast.While),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


class _Parsed(NamedTuple):
    """What a file has.

    Attributes:
        statements: the simple ones, at any depth.
        walruses: where each `:=` is, the outer ones first, and what it assigns to.
        loops: where loops and comprehensions are.
        functions: also those inside of others, and lambdas.
        expressions: by where they are; of those with the same text the outermost.
    """

    statements: list[ast.stmt]
    walruses: list[tuple[Span, Target]]
    loops: list[Span]
    functions: list[_Function]
    expressions: dict[Span, ast.expr]


def parsed_file(file: str) -> _Parsed:
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=256)
def _parsed(source: str) -> _Parsed:
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except SyntaxError:  # a notebook's magics
        nodes = []
    statements = [n for n in nodes if isinstance(n, ast.stmt)]
    walruses = [n for n in nodes if isinstance(n, ast.NamedExpr)]
    outermost_last = [n for n in reversed(nodes) if isinstance(n, ast.expr)]
    return _Parsed(
        statements=[n for n in statements if "body" not in n._fields],
        walruses=[
            (span_of(n), Target(n.target.id, (), span_of(n.value))) for n in walruses
        ],
        loops=[span_of(n) for n in nodes if isinstance(n, _LOOPS)],
        functions=[n for n in nodes if isinstance(n, _FUNCTIONS)],
        expressions={span_of(n): n for n in outermost_last},
    )


def span_of(node: ast.expr | ast.stmt) -> Span:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return node.lineno, node.col_offset, *end


Place: TypeAlias = tuple[str, int, int]  # file, line, column


def is_in_loop(place: Place) -> bool:
    """Whether this is inside of a loop, and not its beginning."""
    file, *at = place
    return any(span[:2] < tuple(at) <= span[2:] for span in parsed_file(file).loops)


def targets_of(statement: ast.stmt) -> list[Target]:
    """What a statement assigns to, by its left sides alone."""
    if isinstance(statement, ast.AugAssign):
        return [*_named(statement.target, statement)]  # the sum too
    if isinstance(statement, ast.Assign):
        left_sides = statement.targets
        value = statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        left_sides = [statement.target]
        value = statement.value
    else:
        return []
    return [target for left_side in left_sides for target in _named(left_side, value)]


def _named(
    target: ast.expr, value: ast.expr | ast.stmt, part: tuple[int, ...] | None = ()
) -> Iterator[Target]:
    """The names in a target which gets a value, or that part of it."""
    if isinstance(target, (ast.Name, ast.Attribute)):
        yield Target(ast.unparse(target), part, span_of(value))
    if not isinstance(target, (ast.Tuple, ast.List)):
        return
    is_display = part == () and isinstance(value, (ast.Tuple, ast.List))
    values = value.elts if is_display else []  # type: ignore[union-attr]
    starred = any(isinstance(x, ast.Starred) for x in (*target.elts, *values))
    for i, element in enumerate(target.elts):
        if len(values) == len(target.elts) and not starred:
            yield from _named(element, values[i])
        else:
            yield from _named(
                element, value, None if starred or part is None else (*part, i)
            )


# --- Functions ------------------------------------------------------------------------


def _function_of(line: SourceLine) -> _Function | None:
    around = [
        f for f in parsed_file(line.file).functions if is_within(line, span_of(f))
    ]
    return max(around, key=span_of, default=None)


def _own_statements(function: _Function) -> list[ast.stmt]:
    """The simple statements of a function, without those of functions inside it."""
    simple = []
    queue = list(function.body) if isinstance(function.body, list) else []
    while queue:
        statement = queue.pop(0)
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            continue
        simple.append(statement)
        queue += [n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.stmt)]
    return simple


def returned_by(line: SourceLine) -> ast.expr | None:
    """What the function of a frame returns: by the statement in which the frame is, or
    by the only one that returns.
    """
    function = _function_of(line)
    if function is None or isinstance(function, ast.Lambda):
        return None if function is None else function.body
    returns = [x for x in _own_statements(function) if isinstance(x, ast.Return)]
    inside = [x for x in returns if is_within(line, span_of(x))]
    chosen = inside or returns
    return chosen[0].value if len(chosen) == 1 else None


def last_assigned(
    line: SourceLine, name: ast.Name
) -> tuple[ast.expr | None, tuple[int, ...]]:
    """The last that the function of a frame assigns to a name before it is used, and
    which part of it.
    """
    function = _function_of(line)
    assignments: list[tuple[Span, Target]] = []
    for statement in _own_statements(function) if function else ():
        if span_of(statement) < span_of(name):
            named = [t for t in targets_of(statement) if t.name == name.id]
            assignments += [(span_of(statement), t) for t in named]
    if not assignments:
        return None, ()
    _, target = max(assignments, key=operator.itemgetter(0))
    node = parsed_file(line.file).expressions.get(target.span)
    return (None, ()) if target.part is None else (node, target.part)


def is_within(line: SourceLine, span: Span) -> bool:
    begin = (line.line, line.column)
    end = (line.end_line, line.end_column)
    return begin >= span[:2] and end <= span[2:]
