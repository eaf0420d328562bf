"""Writes of attributes, items that are read, and what makes containers grow."""

from __future__ import annotations

import ast

import pytest

from gradguard.analysis.program.index import UNKNOWN
from tests.analysis.program.programs import program

WRITES: dict[str, tuple[str, object, list[int]]] = {
    "assignment": ("p.requires_grad = False", UNKNOWN, [1]),
    "of its value": ("p.requires_grad = False\nq.requires_grad = True", False, [1]),
    "by a variable": ("on = False\np.requires_grad = on", False, [2]),
    "by what is not known": ("p.requires_grad = f()", False, [1]),
    "by a parameter": ("def f(p, on):\n    p.requires_grad = on", False, [2]),
    "setattr": ("setattr(p, 'requires_grad', False)", False, [1]),
    "registered": ("m.register_buffer('requires_grad', False)", False, [1]),
    "setattr of another": ("setattr(p, 'other', False)", False, []),
    "setattr by a variable": ("n = 'requires_grad'\nsetattr(p, n, False)", False, [2]),
    "method": ("p.requires_grad_(False)", False, [1]),
    "method without a value": ("p.requires_grad_()", False, []),
    "method by keyword": ("p.requires_grad_(requires_grad=False)", False, [1]),
    "tuple": ("a.requires_grad, b.requires_grad = True, False", False, [1]),
    "in a loop over all": ("for p in ps:\n    p.requires_grad = False", False, [2]),
    "vars": ("vars(p)['requires_grad'] = False", False, [1]),
    "dict": ("p.__dict__['requires_grad'] = False", False, [1]),
    "augmented": ("p.requires_grad += 1", False, [1]),
    "loop target": ("for p.requires_grad in r:\n    pass", False, [1]),
    "with target": ("with f() as p.requires_grad:\n    pass", UNKNOWN, [1]),
    "not read": ("x = p.requires_grad", UNKNOWN, []),
    "0 is not False": ("p.requires_grad = 0", False, []),
}


@pytest.mark.parametrize(("text", "value", "wanted"), WRITES.values(), ids=WRITES)
def test_writes(text: str, value: object, wanted: list[int]) -> None:
    assert [write.node.lineno for write in program(text).writes("requires_grad", value)] == wanted


ITEMS: dict[str, tuple[str, list[object]]] = {
    "constant": ("xs[0]", [0]),
    "variable": ("for i in r:\n    xs[i]", ["i"]),
    "variable that is constant": ("k = 1\nxs[k]", [1]),
    "key": ("xs['a']", ["a"]),
    "slice": ("xs[1:]", ["1:"]),
    "loop": ("for x in xs:\n    pass", [None]),
    "enumerate": ("for i, x in enumerate(xs):\n    pass", [None]),
    "zip": ("for x, y in zip(xs, ys):\n    pass", [None]),
    "comprehension": ("[x for x in reversed(xs)]", [None]),
    "unpacking": ("a, b = xs", [None]),
    "star": ("f(*xs)", [None]),
    "values": ("for x in xs.values():\n    pass", [None]),
    "get": ("xs.get('a')", ["a"]),
    "pop": ("xs.pop()", [None]),
    "written only": ("xs[0] = 1", []),
    "length": ("len(xs)", []),
    "other": ("ys[0]", []),
}


GROWTHS: dict[str, tuple[str, str, list[list[str]]]] = {
    "append": ("xs.append(v)", "xs", [["v"]]),
    "extend": ("xs.extend(vs)", "xs", [["vs"]]),
    "insert": ("xs.insert(0, v)", "xs", [["0", "v"]]),
    "add": ("xs.add(v)", "xs", [["v"]]),
    "update by keyword": ("xs.update(a=v)", "xs", [["v"]]),
    "item": ("xs[k] = v", "xs", [["v"]]),
    "items": ("xs[0], xs[1] = v, w", "xs", [["v"], ["w"]]),
    "item augmented": ("xs[k] += v", "xs", [["v"]]),
    "item of a loop": ("for xs[k] in r:\n    pass", "xs", [[]]),
    "container in a container": ("xs[k].append(v)", "xs", [["v"]]),
    "container made on demand": ("xs.setdefault(k, []).append(v)", "xs", [["v"], ["k", "[]"]]),
    "plus equals": ("xs += [v]", "xs", [["[v]"]]),
    "a number's plus equals": ("xs += v", "xs", []),
    "written anew": ("xs = xs + [v]", "xs", [["[v]"]]),
    "written anew with a star": ("xs = [*xs, v]", "xs", [["v"]]),
    "dict written anew": ("xs = {**xs, 'k': v}", "xs", [["v"]]),
    "heappush": ("import heapq\nheapq.heappush(xs, v)", "xs", [["v"]]),
    "heappush by name": ("from heapq import heappush\nheappush(xs, v)", "xs", [["v"]]),
    "under another name": ("push = xs.append\npush(v)", "xs", [["v"]]),
    "attribute": ("self.xs.append(v)", "self.xs", [["v"]]),
    "not another's": ("self.xs.append(v)", "xs", []),
    "replaced": ("xs = [v]", "xs", []),
}


@pytest.mark.parametrize(("text", "name", "wanted"), GROWTHS.values(), ids=GROWTHS)
def test_grows(text: str, name: str, wanted: list[list[str]]) -> None:
    assert [[ast.unparse(value) for value in growth.values] for growth in program(text).grows(name)] == wanted
