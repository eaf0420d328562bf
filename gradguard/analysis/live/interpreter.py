"""What an expression of the user's is worth, worked out from its text and from objects that are only read (`gradguard.core.safe_read`).

Nothing of the user's runs: calls are known only of a few built-in functions, of methods of Python's own types and of torch's own
methods that list what a module holds; operators and comparisons only of Python's own types. Anything else is UnknownError, and so is
what takes too long.
"""

from __future__ import annotations

import ast
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import nn

from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import (
    UNKNOWN,
    attributes,
    in_class,
    is_quiet,
    item_of,
    modules_in,
    named_children,
    named_modules,
    named_parameters,
    pairs,
    parameters_in,
    peek,
    store_of,
    unless_loud,
)

STEPS = 50_000  # nodes of the text, items of what is gone through
_SIZE = 10_000  # items of one result
_SCALARS: tuple[type, ...] = (str, int, float, bool, bytes, type(None))
_DISPLAYS: tuple[type, ...] = (list, tuple, set, frozenset, dict)
_HOLDERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_STRING_METHODS = frozenset({"startswith", "endswith", "split", "rsplit", "lower", "upper", "strip", "lstrip", "rstrip", "find", "count",
                             "partition", "rpartition", "removeprefix", "removesuffix", "replace", "isdigit", "join"})  # fmt: skip
_LISTING: dict[str, Callable[[nn.Module], Iterable[Any]]] = {
    "parameters": parameters_in,
    "named_parameters": named_parameters,
    "modules": modules_in,
    "named_modules": named_modules,
    "named_children": named_children,
    "children": lambda module: (child for _, child in named_children(module)),
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class UnknownError(Exception):
    """It cannot be told without running the user's code."""


class Interpreter:
    """Works out expressions in a scope.

    Args:
        names: the values of the names that may be read, beside the built-in functions that are known.
        steps: how much may be done, all together.
    """

    def __init__(self, names: Mapping[str, Any], steps: int = STEPS) -> None:
        self.names = dict(names)
        self._left = steps

    def value(self, node: ast.expr) -> Any:
        """An expression's value.

        Raises:
            UnknownError: it cannot be told.
        """
        self._count()
        known = _NODES.get(type(node))
        if known is None:
            raise UnknownError
        try:
            found = known(self, node)
        except UnknownError:
            raise
        except internal_error():  # what the program would get as well
            raise UnknownError from None
        if found is UNKNOWN:
            raise UnknownError
        return found

    def truth(self, node: ast.expr) -> bool:
        """Whether an expression is true where it is a condition."""
        return self.true(self.value(node))

    def true(self, value: Any) -> bool:
        """Whether a value counts as true."""
        if type(value) in _SCALARS or type(value) in _DISPLAYS or type(value) is range:
            return bool(value)
        if isinstance(value, _HOLDERS) and _is_torchs(value, "__len__") and in_class(type(value), "__bool__") is UNKNOWN:
            return bool(store_of(value, "_modules"))
        if is_quiet(value) and in_class(type(value), "__bool__") is UNKNOWN and in_class(type(value), "__len__") is UNKNOWN:
            return True
        raise UnknownError

    def items(self, value: Any) -> Iterator[Any]:
        """What a loop over a value goes through."""
        for count, item in enumerate(_iterated(value)):
            self._count()
            if count >= _SIZE:
                raise UnknownError
            yield unless_loud(item)

    def assign(self, target: ast.expr, value: Any) -> None:
        """Gives the names of a target their values."""
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and type(value) in (tuple, list) and len(value) == len(target.elts):
            for part, item in zip(target.elts, value, strict=True):
                self.assign(part, unless_loud(item))
        else:
            raise UnknownError

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise UnknownError

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        return self.names.get(node.id, UNKNOWN)

    def _attribute(self, node: ast.Attribute) -> Any:
        return peek(self.value(node.value), node.attr)

    def _subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.value(node.value), self.value(node.slice)
        if type(owner) in (str, range):
            return owner[key] if type(key) in (int, slice) else UNKNOWN
        own = type(owner) in _DISPLAYS or (isinstance(owner, _HOLDERS) and _is_torchs(owner, "__getitem__"))
        return item_of(owner, key) if own else UNKNOWN

    def _slice(self, node: ast.Slice) -> Any:
        ends = (None if end is None else self.value(end) for end in (node.lower, node.upper, node.step))
        return slice(*(end if type(end) in (int, type(None)) else self._fail() for end in ends))

    def _both(self, node: ast.BoolOp) -> Any:
        wanted = isinstance(node.op, ast.Or)
        found: Any = None
        for part in node.values:
            found = self.value(part)
            if self.true(found) is wanted:
                break
        return found

    def _unary(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return not self.truth(node.operand)
        value = self.value(node.operand)
        return -value if isinstance(node.op, ast.USub) and type(value) in (int, float) else UNKNOWN

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        compute = _ARITHMETIC.get(type(node.op))
        numbers = all(type(each) in (int, float, bool) for each in (left, right))
        joined = isinstance(node.op, ast.Add) and type(left) is type(right) and type(left) in (str, list, tuple)
        if compute is None or not (numbers or joined) or (joined and len(left) + len(right) > _SIZE):
            return UNKNOWN
        return compute(left, right)

    def _compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        for operation, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            if isinstance(operation, (ast.Is, ast.IsNot)):
                found = (left is right) is isinstance(operation, ast.Is)
            elif isinstance(operation, (ast.In, ast.NotIn)):
                found = self._contains(right, left) is isinstance(operation, ast.In)
            else:
                found = bool(_COMPARISONS[type(operation)](self._plain(left), self._plain(right)))
            if not found:
                return False
            left = right
        return True

    def _contains(self, held: Any, value: Any) -> bool:
        if type(held) is str:
            return value in held if type(value) is str else self._fail()
        plain = self._plain(value)
        return any(item is value or self._plain(item) == plain for item in self.items(held))

    def _plain(self, value: Any) -> Any:
        """A value that Python alone compares."""
        self._count()
        if type(value) in _DISPLAYS:
            for item in _iterated(value.items() if type(value) is dict else value):
                self._plain(item)
        elif type(value) not in _SCALARS and type(value) is not range:
            raise UnknownError
        return value

    def _chosen(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.truth(node.test) else node.orelse)

    def _several(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        found: list[Any] = []
        for part in node.elts:
            found.extend(self.items(self.value(part.value)) if isinstance(part, ast.Starred) else [self.value(part)])
        return self._made(found, {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)])

    def _made(self, found: list[Any], kind: type) -> Any:
        return {self._plain(item) for item in found} if kind in (set, frozenset) else kind(found)

    def _dict(self, node: ast.Dict) -> Any:
        return {
            (self._fail() if key is None else self._plain(self.value(key))): self.value(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }

    def _formatted(self, node: ast.JoinedStr) -> Any:
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
                value = self.value(part.value)
                text += str(value) if type(value) in _SCALARS else self._fail()
        return text

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        outside = self.names
        self.names = dict(outside)
        try:
            if isinstance(node, ast.DictComp):
                return dict(self._each(node.generators, lambda: (self._plain(self.value(node.key)), self.value(node.value))))
            element = node.elt
            found = list(self._each(node.generators, lambda: self.value(element)))
            return self._made(found, set if isinstance(node, ast.SetComp) else list)
        finally:
            self.names = outside

    def _each(self, generators: list[ast.comprehension], make: Callable[[], Any]) -> Iterator[Any]:
        first, *rest = generators
        if first.is_async:
            raise UnknownError
        for item in self.items(self.value(first.iter)):
            self.assign(first.target, item)
            if all(self.truth(test) for test in first.ifs):
                if rest:
                    yield from self._each(rest, make)
                else:
                    yield make()

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(argument, ast.Starred) for argument in node.args) or node.keywords:
            raise UnknownError
        if isinstance(node.func, ast.Name) and node.func.id not in self.names:
            known = _BUILTINS.get(node.func.id)
            return UNKNOWN if known is None else known(self, *map(self.value, node.args))
        if not isinstance(node.func, ast.Attribute):
            raise UnknownError
        owner, method = self.value(node.func.value), node.func.attr
        given = [self.value(argument) for argument in node.args]
        if type(owner) is str and method in _STRING_METHODS:
            return getattr(owner, method)(*map(self._plain, given))
        if type(owner) in (dict, OrderedDict):
            if method in ("items", "keys", "values") and not given:
                return [{"items": (key, value), "keys": key, "values": value}[method] for key, value in pairs(owner, _SIZE)]
            return item_of(owner, given[0]) if method == "get" and len(given) == 1 else UNKNOWN
        if type(owner) in (list, tuple) and method in ("index", "count") and len(given) == 1:
            return getattr(self._plain(owner), method)(self._plain(given[0]))
        if isinstance(owner, nn.Module) and not given:
            if (
                method in _LISTING
                and _is_torchs(owner, method)
                and all(_is_torchs(owner, used) for used in ("named_parameters", "named_modules"))
            ):
                return list(islice(_LISTING[method](owner), _SIZE))
            if isinstance(owner, nn.ModuleDict) and method in ("items", "keys", "values") and _is_torchs(owner, method):
                held = store_of(owner, "_modules").items()
                return [{"items": (key, value), "keys": key, "values": value}[method] for key, value in held]
        return UNKNOWN

    def _fail(self) -> Any:
        raise UnknownError

    # -- built-in functions -------------------------------------------------------------------------------------------

    def _len(self, value: Any) -> Any:
        if type(value) in (*_DISPLAYS, str, bytes, range):
            return len(value)
        return len(store_of(value, "_modules")) if isinstance(value, _HOLDERS) and _is_torchs(value, "__len__") else UNKNOWN

    def _text(self, value: Any) -> Any:
        return str(value) if type(value) in _SCALARS else UNKNOWN

    def _range(self, *ends: Any) -> Any:
        return range(*ends) if all(type(end) is int for end in ends) else UNKNOWN

    def _number(self, value: Any) -> Any:
        return int(value) if type(value) in (int, float, bool) or (type(value) is str and len(value) < 20) else UNKNOWN

    def _extreme(self, choose: Callable[[Any], Any], *values: Any) -> Any:
        return choose(list(map(self._plain, self.items(values[0]) if len(values) == 1 else values)))

    def _get(self, value: Any, name: Any, *default: Any) -> Any:
        found = peek(value, name) if type(name) is str else UNKNOWN
        return default[0] if found is UNKNOWN and default and not self._has(value, name) else found

    def _has(self, value: Any, name: Any) -> Any:
        if type(name) is not str or not is_quiet(value) or isinstance(value, type):
            raise UnknownError
        if peek(value, name) is not UNKNOWN:
            return True
        asked = in_class(type(value), "__getattr__")  # may have an answer, as may what stands in the class
        if in_class(type(value), name) is not UNKNOWN or (asked is not UNKNOWN and asked is not nn.Module.__getattr__):
            raise UnknownError
        return name in attributes(value)

    def _is_a(self, value: Any, kinds: Any) -> Any:
        wanted = kinds if type(kinds) is tuple else (kinds,)
        return issubclass(type(value), wanted) if all(type(kind) is type for kind in wanted) else UNKNOWN


def _is_torchs(value: Any, method: str) -> bool:
    """Whether a method of a module is torch's own, which the user's class has not overridden."""
    found = in_class(type(value), method)
    return any(found is vars(kind).get(method) for kind in (nn.Module, *_HOLDERS))


def _iterated(value: Any) -> Iterable[Any]:
    if type(value) in (*_DISPLAYS, str, range, type({}.items())):
        found: Iterable[Any] = value
        return found
    if isinstance(value, _HOLDERS) and _is_torchs(value, "__iter__"):
        held = store_of(value, "_modules")
        return list(held) if isinstance(value, nn.ModuleDict) else list(held.values())
    raise UnknownError


_NODES: dict[type[ast.AST], Callable[[Interpreter, Any], Any]] = {
    ast.Constant: Interpreter._constant,
    ast.Name: lambda self, node: self._name(node),  # which a subclass may look up elsewhere
    ast.Attribute: Interpreter._attribute,
    ast.Subscript: Interpreter._subscript,
    ast.Slice: Interpreter._slice,
    ast.BoolOp: Interpreter._both,
    ast.UnaryOp: Interpreter._unary,
    ast.BinOp: Interpreter._binary,
    ast.Compare: Interpreter._compare,
    ast.IfExp: Interpreter._chosen,
    ast.List: Interpreter._several,
    ast.Tuple: Interpreter._several,
    ast.Set: Interpreter._several,
    ast.Dict: Interpreter._dict,
    ast.JoinedStr: Interpreter._formatted,
    ast.ListComp: Interpreter._comprehension,
    ast.SetComp: Interpreter._comprehension,
    ast.DictComp: Interpreter._comprehension,
    ast.GeneratorExp: Interpreter._comprehension,
    ast.Call: lambda self, node: self._call(node),
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "any": lambda self, value: any(self.true(item) for item in self.items(value)),
    "all": lambda self, value: all(self.true(item) for item in self.items(value)),
    "list": lambda self, *value: [item for each in value for item in self.items(each)],
    "tuple": lambda self, *value: tuple(item for each in value for item in self.items(each)),
    "set": lambda self, *value: {self._plain(item) for each in value for item in self.items(each)},
    "enumerate": lambda self, value: list(enumerate(self.items(value))),
    "zip": lambda self, *values: list(zip(*map(self.items, values), strict=False)),
    "reversed": lambda self, value: list(self.items(value))[::-1],
    "len": Interpreter._len,
    "str": Interpreter._text,
    "range": Interpreter._range,
    "isinstance": Interpreter._is_a,
    "getattr": Interpreter._get,
    "hasattr": Interpreter._has,
    "int": Interpreter._number,
    "min": lambda self, *values: self._extreme(min, *values),
    "max": lambda self, *values: self._extreme(max, *values),
    "sorted": lambda self, value: self._extreme(sorted, value),
}
