"""Who calls whom, with what, and what comes back."""

from __future__ import annotations

import ast

import pytest

from gradguard.analysis.program.index import calls_in
from tests.analysis.program.programs import function, node, program, texts

CALLS: dict[str, tuple[str, str, list[int]]] = {
    "full name": ("import torch\ntorch.optim.Adam(p)", "torch.optim.Adam", [2]),
    "last part": ("import torch\ntorch.optim.Adam(p)", "Adam", [2]),
    "import as": ("import torch.optim as o\no.Adam(p)", "torch.optim.Adam", [2]),
    "from import": ("from torch.optim import Adam as A\nA(p)", "torch.optim.Adam", [2]),
    "method": ("opt.step()\nscaler.step(opt)", "step", [1, 2]),
    "method of an attribute": ("self.opt.step()", "opt.step", [1]),
    "under another name": ("step = opt.step\nstep()", "step", [2]),
    "under a quite other name": ("go = opt.step\ngo()", "opt.step", [2]),
    "in either branch": ("go = opt.step if c else print\ngo()", "opt.step", [2]),
    "of a result": ("f().step()", "step", [1]),
    "through partial": ("from functools import partial\ngo = partial(opt.step, c)\ngo()", "opt.step", [3]),
    "not a longer name": ("opt.substep()", "step", []),
    "not an own function": ("def Adam(p): pass\nAdam(p)", "torch.optim.Adam", []),
    "rebound import": ("from torch import relu\nrelu = mine\nrelu(x)", "torch.relu", []),
    "relative import": ("from .m import f\nf()", ".m.f", [2]),
}


@pytest.mark.parametrize(("text", "name", "wanted"), CALLS.values(), ids=CALLS)
def test_calls(text: str, name: str, wanted: list[int]) -> None:
    assert [call.lineno for call in program(text).calls(name)] == wanted


CALLERS: dict[str, tuple[str, str, list[int]]] = {
    "function": ("def f(): pass\nf()\nf()", "f", [2, 3]),
    "under another name": ("def f(): pass\ng = f\ng()", "f", [3]),
    "from a function": ("def f(): pass\ndef g():\n    f()", "f", [3]),
    "shadowed": ("def f(): pass\ndef g(f):\n    f()", "f", []),
    "method by self": ("class A:\n    def f(self): pass\n    def g(self):\n        self.f()", "f", [4]),
    "method of an instance": ("class A:\n    def f(self): pass\na = A()\na.f()", "f", [4]),
    "method of another class": ("class A:\n    def f(self): pass\nclass B:\n    def f(self): pass\nB().f()\na = B()\na.f()", "f", []),
    "method of who knows whom": ("class A:\n    def f(self): pass\ndef g(a):\n    a.f()", "f", [4]),
    "inherited": ("class A:\n    def f(self): pass\nclass B(A): pass\nB().f()", "f", [4]),
    "super": ("class A:\n    def f(self): pass\nclass B(A):\n    def f(self):\n        super().f()", "f", [5]),
    "constructor": ("class A:\n    def __init__(self): pass\nA()", "__init__", [3]),
    "forward": ("class A(Module):\n    def forward(self, x): pass\na = A()\na(1)", "forward", [4]),
    "forward of an attribute": (
        "class A(Module):\n    def forward(self, x): pass\nclass B:\n    def __init__(self):\n        self.a = A()\n"
        "    def g(self):\n        self.a(1)",
        "forward",
        [7],
    ),
    "function in an attribute": ("def f(): pass\nx.go = f\nx.go()", "f", [3]),
    "partial": ("from functools import partial\ndef f(a, b): pass\ng = partial(f, 1)\ng(2)", "f", [4]),
    "inner function": ("def g():\n    def f(): pass\n    f()", "f", [3]),
    "recursion": ("def f():\n    f()", "f", [2]),
}


@pytest.mark.parametrize(("text", "name", "wanted"), CALLERS.values(), ids=CALLERS)
def test_callers(text: str, name: str, wanted: list[int]) -> None:
    asked = program(text)
    named = [each for each in asked.source.scopes if getattr(each, "name", None) == name]
    first = min(named, key=lambda each: each.lineno)
    assert [call.lineno for call in asked.callers(first)] == wanted  # type: ignore[arg-type]


BIND: dict[str, tuple[str, str, dict[str, str | None]]] = {
    "by position": ("def f(a, b): pass", "f(1, 2)", {"a": "1", "b": "2"}),
    "by keyword": ("def f(a, b): pass", "f(b=1, a=2)", {"a": "2", "b": "1"}),
    "default": ("def f(a, b=3): pass", "f(1)", {"a": "1", "b": "3"}),
    "nothing": ("def f(a, b): pass", "f(1)", {"a": "1", "b": None}),
    "keyword only": ("def f(a, *, b=3, c=4): pass", "f(1, c=2)", {"a": "1", "b": "3", "c": "2"}),
    "positional only": ("def f(a, /, b): pass", "f(1, b=2)", {"a": "1", "b": "2"}),
    "starred": ("def f(a, b, c=1): pass", "f(1, *xs)", {"a": "1", "b": "?", "c": "?"}),
    "double starred": ("def f(a, b=1): pass", "f(2, **kw)", {"a": "2", "b": "?"}),
    "vararg": ("def f(a, *rest): pass", "f(1, 2, 3)", {"a": "1", "rest": "(2, 3)"}),
    "kwarg": ("def f(a, **kw): pass", "f(1, b=2)", {"a": "1", "kw": "?"}),
    "method": ("class A:\n    def f(self, x): pass\na = A()", "a.f(1)", {"self": "a", "x": "1"}),
    "method on the class": ("class A:\n    def f(self, x): pass\na = A()", "A.f(a, 1)", {"self": "a", "x": "1"}),
    "static method": ("class A:\n    @staticmethod\n    def f(x): pass\na = A()", "a.f(1)", {"x": "1"}),
    "class method": ("class A:\n    @classmethod\n    def f(cls, x): pass", "A.f(1)", {"cls": "A", "x": "1"}),
    "constructor": ("class A:\n    def __init__(self, x): pass", "A(1)", {"self": "?", "x": "1"}),
    "partial": ("from functools import partial\ndef f(a, b, c): pass\ng = partial(f, 1, c=3)", "g(2)", {"a": "1", "b": "2", "c": "3"}),
    "under another name": ("def f(a): pass\ng = f", "g(1)", {"a": "1"}),
}


@pytest.mark.parametrize(("text", "call", "wanted"), BIND.values(), ids=BIND)
def test_bind(text: str, call: str, wanted: dict[str, str | None]) -> None:
    asked = program(f"{text}\n{call}")
    called = node(asked, call)
    one = next(each for each in asked.callees(called) if isinstance(each, ast.FunctionDef))
    bound = asked.bind(called, one)
    assert {name: None if value is None else texts([value])[0] for name, value in bound.items()} == wanted


RETURNS: dict[str, tuple[str, list[str]]] = {
    "one": ("def f():\n    return 1", ["1"]),
    "several": ("def f(c):\n    if c:\n        return 1\n    return 2", ["1", "2"]),
    "none": ("def f():\n    return", []),
    "yield": ("def f():\n    yield 1\n    yield from g()", ["1", "g()"]),
    "not of an inner function": ("def f():\n    def g():\n        return 1\n    return g", ["g"]),
    "not of a lambda": ("def f():\n    g = lambda: (yield 1)\n    return 2", ["2"]),
}


@pytest.mark.parametrize(("text", "wanted"), RETURNS.values(), ids=RETURNS)
def test_returns(text: str, wanted: list[str]) -> None:
    asked = program(text)
    assert texts(asked.returns(function(asked, "f"))) == wanted


SLICES: dict[str, tuple[str, str, set[str], set[str]]] = {
    # program, expression of the last line, what must be in its slice, what must not
    "names": ("a = f()\nb = a + 1\nc = 2\nuse(b)", "b", {"f()", "a + 1"}, {"2"}),
    "branches": ("if t:\n    a = one()\nelse:\n    a = two()\nuse(a)", "a", {"one()", "two()"}, {"t"}),
    "overwritten": ("a = one()\na = two()\nuse(a)", "a", {"two()"}, {"one()"}),
    "augmented": ("a = one()\na += two()\nuse(a)", "a", {"one()", "two()"}, set()),
    "carried by a loop": ("h = one()\nfor i in r():\n    h = cell(h, i)\nuse(h)", "h", {"one()", "cell(h, i)", "r()"}, set()),
    "through a call": ("def f(x):\n    return x * k()\ny = f(one())\nuse(y)", "y", {"x * k()", "one()"}, set()),
    "a parameter from its callers": ("def f(x):\n    use(x)\nf(one())\nf(x=two())", "x", {"one()", "two()"}, set()),
    "a default": ("def f(x=d()):\n    use(x)\nf()", "x", {"d()"}, set()),
    "an attribute": (
        "class A:\n    def set(self):\n        self.h = one()\n    def get(self):\n        use(self.h)",
        "self.h",
        {"one()"},
        set(),
    ),
    "what a list holds": ("xs = []\nfor i in r:\n    xs.append(one(i))\nuse(xs)", "xs", {"one(i)"}, set()),
    "what another list holds": ("def g(xs):\n    xs.append(one())\nxs = []\nuse(xs)", "xs", {"[]"}, {"one()"}),
    "comprehension": ("ys = [one(i) for i in r()]\nuse(ys)", "ys", {"r()", "[one(i) for i in r()]"}, set()),
    "tuple": ("a, b = one(), two()\nuse(a)", "a", {"one()"}, {"two()"}),
    "two calls deep": ("def f():\n    return g()\ndef g():\n    return one()\nuse(f())", "f()", {"g()", "one()"}, set()),
    "a walrus": ("if (n := one()):\n    use(n)", "n", {"one()"}, set()),
    "with": ("with one() as n:\n    use(n)", "n", {"one()"}, set()),
}


@pytest.mark.parametrize(("text", "asked_for", "inside", "outside"), SLICES.values(), ids=SLICES)
def test_slice(text: str, asked_for: str, inside: set[str], outside: set[str]) -> None:
    asked = program(text)
    use = next(call for call in asked.calls("use"))
    found = {ast.unparse(each) for each in asked.slice(use.args[0]).expressions}
    assert inside <= found
    assert not outside & found


def test_slice_stops_at_its_depth() -> None:
    asked = program("def f():\n    return g()\ndef g():\n    return one()\nuse(f())")
    expr = node(asked, "f()", 5)
    assert "g()" not in texts(asked.slice(expr, depth=0).expressions)
    assert "one()" not in texts(asked.slice(expr, depth=1).expressions)
    assert not asked.slice(expr).complete
    whole = program("a = 1\nb = a\nb")
    assert whole.slice(node(whole, "a", 2)).complete


ORIGINS: dict[str, tuple[str, str, set[int]]] = {
    # program, the name that its last assignment binds, the lines that bind its value
    "itself": ("x = f()", "x", {1}),
    "returned by a function": ("def f():\n    y = g()\n    return y\nx = f()", "x", {2}),
    "an item of what is returned": ("def f():\n    a = g()\n    b = h()\n    return a, b\nx, z = f()", "x", {2}),
    "in either branch": ("def f(c):\n    if c:\n        y = 1\n    else:\n        y = 2\n    return y\nx = f(c)", "x", {3, 5}),
    "by either return": ("def f(c):\n    y = 1\n    if c:\n        return y\n    return g()\nx = f(c)", "x", {2, 5}),
    "an expression": ("def f():\n    return g()\nx = f()", "x", {2}),
    "augmented": ("def f(t):\n    t += 1\n    return t\nx = f(x)", "x", {2}),
    "two deep": ("def g():\n    z = 1\n    return z\ndef f():\n    y = g()\n    return y\nx = f()", "x", {2}),
    "handed back": ("def f(y):\n    return y\nx = f(x)", "x", {3}),
    "perhaps handed back": ("def f(y, c):\n    if c:\n        y = 1\n    return y\nx = f(x, c)", "x", {5}),
    "a module": ("class A:\n    def forward(self):\n        y = 1\n        return y\na = A()\nx = a()", "x", {6}),
    "a method": ("class A:\n    def f(self):\n        y = 1\n        return y\na = A()\nx = a.f()", "x", {3}),
    "part of an expression": ("def f():\n    y = 1\n    return y\nx = f() + 1", "x", {4}),
    "star": ("def f():\n    y = 1\n    return y, y\nx, *z = f()", "x", {4}),
}


@pytest.mark.parametrize(("text", "name", "wanted"), ORIGINS.values(), ids=ORIGINS)
def test_origins(text: str, name: str, wanted: set[int]) -> None:
    asked = program(text)
    assert asked.source.tree is not None
    assert {each.lineno for each in asked.origins(asked.source.tree.body[-1], name)} == wanted


RUNS: dict[str, tuple[str, list[str]]] = {
    "a function and what it calls": ("def g(): pass\ndef f():\n    g()\nf()", ["f", "g"]),
    "a function that is not called": ("def g(): pass\ndef f(): pass\nf()", ["f"]),
    "one handed over": ("def f(m):\n    m()\nf(1)", ["?", "f"]),
    "a module": ("class A:\n    def forward(self):\n        g()\ndef g(): pass\na = A()\na()", ["forward", "g"]),
    "recursion": ("def f():\n    f()\nf()", ["f"]),
}


@pytest.mark.parametrize(("text", "wanted"), RUNS.values(), ids=RUNS)
def test_may_run(text: str, wanted: list[str]) -> None:
    asked = program(text)
    assert asked.source.tree is not None
    assert sorted(getattr(each, "name", "") or "?" for each in asked.may_run(asked.source.tree.body[-1])) == wanted


FUNCTIONS: dict[str, tuple[str, list[int]]] = {
    "by name": ("def f(): pass\nuse(f)", [1]),
    "a lambda": ("use(lambda g: g)", [1]),
    "partial": ("from functools import partial\ndef f(a): pass\nuse(partial(f, 1))", [2]),
    "made by a factory": ("def make():\n    def hook(g): pass\n    return hook\nuse(make())", [2]),
    "an instance": ("class A:\n    def __call__(self, g): pass\nuse(A())", [2]),
    "itself": ("class A:\n    def __init__(self):\n        use(self)\n    def __call__(self, g): pass", [4]),
    "handed on": ("def add(hook):\n    use(hook)\ndef f(g): pass\nadd(f)", [3]),
    "either of two": ("def f(): pass\ndef g(): pass\nh = f if c else g\nuse(h)", [1, 2]),
    "of another file": ("from other import f\nuse(f)", []),
}


@pytest.mark.parametrize(("text", "wanted"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(text: str, wanted: list[int]) -> None:
    asked = program(text)
    (call,) = asked.calls("use")
    assert [each.lineno for each in asked.functions(call.args[0])] == wanted


def test_functions_by_name_and_what_instances_run() -> None:
    asked = program("def f(): pass\nclass A:\n    def __call__(self): pass\nclass B:\n    def forward(self): pass\nclass f: pass")
    assert [[each.lineno for each in asked.functions_named(name)] for name in ("f", "A", "B", "g")] == [[1], [3], [5], []]


GIVEN: dict[str, tuple[str, str, str | None]] = {
    "an argument": ("def f(a, b=1): pass\nf(x)", "a", "x"),
    "not a default": ("def f(a, b=1): pass\nf(x)", "b", None),
    "not what a star hides": ("def f(a, b=1): pass\nf(*x)", "a", None),
    "past a context": ("class F:\n    @staticmethod\n    def forward(ctx, a): pass\nF.apply(x)", "a", "x"),
    "of an inner function of a method": ("class A:\n    def g(self):\n        def f(a): pass\n        f(x)", "a", "x"),
}


@pytest.mark.parametrize(("text", "name", "wanted"), GIVEN.values(), ids=GIVEN)
def test_given(text: str, name: str, wanted: str | None) -> None:
    asked = program(text)
    called = next(each for each in asked.source.scopes if getattr(each, "name", None) in ("f", "forward"))
    call = asked.calls("f", "apply")[0]
    found = asked.given(call, called, name)  # type: ignore[arg-type]
    assert (None if found is None else ast.unparse(found)) == wanted


def test_calls_of_several_names_and_files() -> None:
    one, other = program("f()\ng()\nh()"), program("from m import f as k\nk()")
    assert [call.lineno for call in one.calls("f", "h")] == [1, 3]
    assert [call.lineno for _, call in calls_in([one.source], "g")] == [2]
    assert [call.lineno for call in other.calls("f")] == [2]
    assert one.calls("missing") == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f(a, b=1)", {"b": "1"}),
        ("s = {'b': 1, 'c': x}\nf(a, **s)", {"b": "1", "c": "x"}),
        ("s = dict(b=1)\nf(**s, c=2)", {"b": "1", "c": "2"}),
        ("s = {'b': 1} if q else {'b': 2}\nf(**s)", {}),
        ("f(**load())", {}),
    ],
)
def test_keywords(text: str, wanted: dict[str, str]) -> None:
    asked = program(text)
    (call,) = asked.calls("f")
    assert {name: ast.unparse(value) for name, value in asked.keywords(call).items()} == wanted
