"""Where a value goes: what drops it, whether it is returned, whether anything may read it."""

from __future__ import annotations

import pytest

from gradguard.analysis.program.destinations import destination
from tests.analysis.program.programs import node, program

# text, the expression, the lines that drop it, whether it is returned, whether it is read
DESTINATIONS: dict[str, tuple[str, str, list[int], bool, bool]] = {
    "statement of its own": ("a + b", "a + b", [1], False, False),
    "name that nothing reads": ("x = a + b", "a + b", [1], False, False),
    "name that is read": ("x = a + b\nf(x)", "a + b", [], False, True),
    "read below a condition": ("x = a + b\nif c:\n    x.norm()", "a + b", [], False, True),
    "bound again": ("x = a + b\nx = 1\nf(x)", "a + b", [1], False, False),
    "loop variable": ("for x in xs:\n    x = x + 1", "x + 1", [2], False, False),
    "loop variable, read after the loop": ("for x in xs:\n    x = x + 1\nf(x)", "x + 1", [], False, True),
    "loop variable in a condition of while": ("while x:\n    x = x + 1", "x + 1", [], False, True),
    "alias": ("x = a + b\ny = x", "a + b", [2], False, False),
    "alias that is read": ("x = a + b\ny = x\ny.sum()", "a + b", [], False, True),
    "walrus": ("f(x := a + b)", "a + b", [], False, True),
    "pair": ("x, y = a + b, 1\nf(y)", "a + b", [1], False, False),
    "returned": ("def f(a, b):\n    return a + b", "a + b", [], True, False),
    "returned by name": ("def f(a, b):\n    x = a + b\n    return x", "a + b", [], True, False),
    "lambda": ("f = lambda a, b: a + b", "a + b", [], True, False),
    "comprehension": ("[a + b for a in xs]", "a + b", [1], False, False),
    "comprehension, read": ("ys = [a + b for a in xs]\nf(ys)", "a + b", [], False, True),
    "comprehension, an item is read": ("ys = [a + b for a in xs]\nys[0].sum()", "a + b", [], False, True),
    "comprehension, gone over": ("ys = [a + b for a in xs]\nfor y in ys:\n    x = y", "a + b", [3], False, False),
    "comprehension, gone over and read": ("ys = [a + b for a in xs]\nfor y in ys:\n    y.sum()", "a + b", [], False, True),
    "builtin function": ("list(zip([a + b], xs))", "a + b", [1], False, False),
    "list": ("ys = []\nfor a in xs:\n    ys.append(a + b)", "a + b", [3], False, False),
    "list that is read": ("ys = []\nfor a in xs:\n    ys.append(a + b)\nf(ys)", "a + b", [], False, True),
    "list of another's": ("def f(ys):\n    ys.append(a + b)", "a + b", [], False, True),
    "item": ("ys = {}\nys['k'] = a + b", "a + b", [2], False, False),
    "item of a state dict": ("sd = m.state_dict()\nfor k in sd:\n    sd[k] = a + b", "a + b", [3], False, False),
    "state dict that is loaded": ("sd = m.state_dict()\nfor k in sd:\n    sd[k] = a + b\nm.load_state_dict(sd)", "a + b", [], False, True),
    "item of who knows what": ("ys = cache()\nys['k'] = a + b", "a + b", [], False, True),
    "item of an attribute": ("self.ys['k'] = a + b", "a + b", [], False, True),
    "attribute": ("self.x = a + b", "a + b", [], False, True),
    "argument of an own function": ("def put(x, y):\n    x = y\nput(p, a + b)", "a + b", [2], False, False),
    "argument that is read": ("def put(x, y):\n    x.copy_(y)\nput(p, a + b)", "a + b", [], False, True),
    "keyword of an own function": ("def put(x, y):\n    x = y\nput(p, y=a + b)", "a + b", [2], False, False),
    "argument of who knows whom": ("put(p, a + b)", "a + b", [], False, True),
    "global of another function": ("x = a + b\ndef f():\n    return x.sum()", "a + b", [], False, True),
    "either branch": ("x = (a + b) if c else d", "a + b", [1], False, False),
    "test": ("if a + b:\n    pass", "a + b", [], False, True),
    "deleted": ("x = a + b\ndel x", "a + b", [], False, False),
}


@pytest.mark.parametrize(("text", "expression", "dropped", "returned", "read"), DESTINATIONS.values(), ids=DESTINATIONS)
def test_destination(text: str, expression: str, dropped: list[int], returned: bool, read: bool) -> None:
    asked = program(text)
    found = destination(asked, node(asked, expression))
    assert (found.returned, found.read) == (returned, read)
    if not read:
        assert [each.lineno for each in found.dropped][-1:] == dropped[-1:] and bool(found.dropped) == bool(dropped)


def test_a_statement_that_has_run_did_not_read_it() -> None:
    asked = program("sd = m.state_dict()\nfor k in sd:\n    sd[k] = sd[k] + b")
    expression = node(asked, "sd[k] + b")
    assert destination(asked, expression).read
    assert not destination(asked, expression, asked.source.statement(expression)).read
