"""Which definitions reach a read, and which reads a definition reaches."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.analysis.program.programs import lines, node, program

CASES: dict[str, tuple[str, str, set[int | str]]] = {
    # program (line 1 is the first one), read as name:line or name:line:nth, lines of the definitions ("?" outside the file)
    "the last one": ("x = 1\nx = 2\nprint(x)", "x:3", {2}),
    "its own right-hand side": ("x = 1\nx = x + 1\nprint(x)", "x:2:1", {1}),
    "after its own right-hand side": ("x = 1\nx = x + 1\nprint(x)", "x:3", {2}),
    "augmented reads": ("x = 1\nx += 2", "x:2", {1}),
    "augmented binds": ("x = 1\nx += 2\nprint(x)", "x:3", {2}),
    "annotated": ("x: int = 1\nprint(x)", "x:2", {1}),
    "annotation without a value": ("x = 1\nx: int\nprint(x)", "x:3", {1}),
    "one branch": ("x = 1\nif c:\n    x = 2\nprint(x)", "x:4", {1, 3}),
    "both branches": ("x = 1\nif c:\n    x = 2\nelse:\n    x = 3\nprint(x)", "x:6", {3, 5}),
    "inside the branch": ("x = 1\nif c:\n    x = 2\n    print(x)", "x:4", {3}),
    "in the other branch": ("x = 1\nif c:\n    x = 2\nelse:\n    print(x)", "x:5", {1}),
    "elif": ("if a:\n    x = 1\nelif b:\n    x = 2\nelse:\n    x = 3\nprint(x)", "x:7", {2, 4, 6}),
    "a branch that returns": ("def f(c):\n    x = 1\n    if c:\n        x = 2\n        return\n    print(x)", "x:6", {2}),
    "a branch that raises": ("x = 1\nif c:\n    x = 2\n    raise E\nprint(x)", "x:5", {1}),
    "after return": ("def f():\n    x = 1\n    return\n    print(x)", "x:4", set()),
    "unbound in a function": ("def f():\n    print(x)\n    x = 1", "x:2", set()),
    "conditional expression": ("y = (x := 1) if c else (x := 2)\nprint(x)", "x:2", {1}),
    "loop carries": ("h = 0\nfor i in r:\n    h = f(h)", "h:3:1", {1, 3}),
    "after the loop": ("h = 0\nfor i in r:\n    h = f(i)\nprint(h)", "h:4", {1, 3}),
    "loop target": ("for i in r:\n    print(i)", "i:2", {1}),
    "loop target after": ("i = 0\nfor i in r:\n    pass\nprint(i)", "i:4", {1, 2}),
    "loop target rebound": ("for p in r:\n    p = p.detach()\n    print(p)", "p:3", {2}),
    "loop target rebound, read": ("for p in r:\n    p = p.detach()\n    print(p)", "p:2:1", {1}),
    "read before the write in a loop": ("x = 1\nwhile c:\n    print(x)\n    x = 2", "x:3", {1, 4}),
    "written at the head of a loop": ("x = 1\nwhile c:\n    x = 2\n    print(x)", "x:4", {3}),
    "while test": ("x = 1\nwhile x:\n    x = 2", "x:2", {1, 3}),
    "endless loop": ("x = 1\nwhile True:\n    x = 2\n    if c:\n        break\nprint(x)", "x:6", {3}),
    "break before the write": ("x = 1\nfor i in r:\n    if i:\n        break\n    x = 2\nprint(x)", "x:6", {1, 5}),
    "continue skips": ("x = 1\nfor i in r:\n    if i:\n        x = 2\n        continue\n    x = 3\nprint(x)", "x:7", {1, 4, 6}),
    "for else": ("x = 1\nfor i in r:\n    x = 2\n    break\nelse:\n    x = 3\nprint(x)", "x:7", {3, 6}),
    "for else without break": ("for i in r:\n    x = 2\nelse:\n    x = 3\nprint(x)", "x:5", {4}),
    "nested loops": ("x = 0\nfor i in r:\n    for j in r:\n        x = x + j\n    x = x * i", "x:4:1", {1, 4, 5}),
    "inner loop starts anew": ("for i in r:\n    h = 0\n    for j in r:\n        h = f(h)", "h:4:1", {2, 4}),
    "async for": ("async def f(r):\n    async for i in r:\n        print(i)", "i:3", {2}),
    "tuple": ("a, b = f()\nprint(b)", "b:2", {1}),
    "nested tuple": ("(a, (b, c)), d = f()\nprint(c)", "c:2", {1}),
    "star": ("a, *b = f()\nprint(b)", "b:2", {1}),
    "swap": ("a = 1\nb = 2\na, b = b, a\nprint(a)", "a:3:1", {1}),
    "chained": ("a = b = 1\nprint(b)", "b:2", {1}),
    "with": ("with f() as x:\n    print(x)", "x:2", {1}),
    "with keeps": ("x = 1\nwith f():\n    x = 2\nprint(x)", "x:4", {3}),
    "with suppress": ("x = 1\nwith suppress(E):\n    x = 2\nprint(x)", "x:4", {1, 3}),
    "with suppress by module": ("x = 1\nwith contextlib.suppress(E):\n    x = 2\nprint(x)", "x:4", {1, 3}),
    "two items": ("with f() as a, g(a) as b:\n    print(a, b)", "a:1:1", {1}),
    "try keeps": ("x = 1\ntry:\n    x = 2\nexcept E:\n    pass\nprint(x)", "x:6", {1, 3}),
    "handler": ("x = 1\ntry:\n    x = 2\n    x = 3\nexcept E:\n    print(x)", "x:6", {1, 3, 4}),
    "handler writes": ("try:\n    x = 2\nexcept E:\n    x = 3\nprint(x)", "x:5", {2, 4}),
    "handler leaves": ("x = 1\ntry:\n    x = 2\nexcept E:\n    raise\nprint(x)", "x:6", {3}),
    "try else": ("try:\n    x = 2\nexcept E:\n    x = 3\nelse:\n    x = 4\nprint(x)", "x:7", {4, 6}),
    "finally": ("x = 1\ntry:\n    x = 2\nfinally:\n    print(x)", "x:5", {1, 3}),
    "after finally": ("x = 1\ntry:\n    x = 2\nfinally:\n    pass\nprint(x)", "x:6", {3}),
    "finally writes": ("try:\n    x = 2\nfinally:\n    x = 3\nprint(x)", "x:5", {4}),
    "return through finally": (
        "def f():\n    x = 1\n    try:\n        x = 2\n        return x\n    finally:\n        print(x)",
        "x:7",
        {2, 4},
    ),
    "break through finally": ("while c:\n    try:\n        x = 1\n        break\n    finally:\n        x = 2\nprint(x)", "x:7", {6}),
    "exception name": ("try:\n    f()\nexcept E as e:\n    print(e)", "e:4", {3}),
    "exception name is gone": ("e = 1\ntry:\n    f()\nexcept E as e:\n    pass\nprint(e)", "e:6", {1}),
    "inner try": ("x = 1\ntry:\n    try:\n        x = 2\n    finally:\n        g()\nexcept E:\n    print(x)", "x:8", {1, 4}),
    "walrus": ("if (n := f()):\n    print(n)", "n:2", {1}),
    "walrus in while": ("while (n := f()):\n    print(n)\nprint(n)", "n:3", {1}),
    "walrus behind and": ("n = 0\nif a and (n := f()):\n    pass\nprint(n)", "n:4", {1, 2}),
    "walrus in comprehension": ("y = [k := i for i in r]\nprint(k)", "k:2", {1}),
    "walrus in comprehension read": ("k = 0\ny = [k := k + i for i in r]", "k:2:1", {1, 2}),
    "comprehension variable": ("i = 0\ny = [i for i in r]\nprint(i)", "i:3", {1}),
    "comprehension element": ("i = 0\ny = [i + 1 for i in r]", "i:2:0", {2}),
    "comprehension iterable": ("i = [1]\ny = [i for i in i]", "i:2:2", {1}),
    "comprehension outer": ("w = 1\ny = [w * i for i in r]", "w:2", {1}),
    "comprehension nested": ("y = [j for i in r for j in i]", "i:1:1", {1}),
    "comprehension filter": ("y = {i: 1 for i in r if i}", "i:1:2", {1}),
    "generator": ("w = 1\ny = (w for _ in r)\nw = 2", "w:2", {1}),
    "del": ("x = 1\ndel x\nx = 2\nprint(x)", "x:4", {3}),
    "del reads": ("x = 1\ndel x", "x:2", {1}),
    "after del in a function": ("def f():\n    x = 1\n    del x\n    print(x)", "x:4", set()),
    "del in a branch": ("x = 1\nif c:\n    del x\nprint(x)", "x:4", {1}),
    "parameter": ("def f(x):\n    print(x)", "x:2", {1}),
    "parameter rebound": ("def f(x):\n    x = x + 1\n    print(x)", "x:3", {2}),
    "keyword parameter": ("def f(*, x=1):\n    print(x)", "x:2", {1}),
    "star parameter": ("def f(*xs, **kw):\n    print(xs, kw)", "kw:2", {1}),
    "default is outside": ("x = 1\ndef f(y=x):\n    x = 2", "x:2", {1}),
    "decorator is outside": ("d = 1\n@d\ndef f():\n    d = 2", "d:2", {1}),
    "lambda parameter": ("x = 1\nf = lambda x: x + 1", "x:2:0", {2}),
    "lambda outer": ("x = 1\nf = lambda: x\nx = 2", "x:2", {1, 3}),
    "import": ("import torch\nprint(torch)", "torch:2", {1}),
    "import as": ("import a.b as c\nprint(c)", "c:2", {1}),
    "import of a submodule": ("import a.b\nprint(a)", "a:2", {1}),
    "from import": ("from a import b as c\nprint(c)", "c:2", {1}),
    "import in try": ("try:\n    import a\nexcept ImportError:\n    a = None\nprint(a)", "a:5", {2, 4}),
    "star import": ("x = 1\nfrom m import *\nprint(x)", "x:3", {1, "?"}),
    "star import, then bound": ("from m import *\nx = 1\nprint(x)", "x:3", {2}),
    "not in the file": ("print(x)", "x:1", {"?"}),
    "builtin": ("print(1)", "print:1", {"?"}),
    "builtin shadowed in a branch": ("if c:\n    print = log\nprint(1)", "print:3", {2, "?"}),
    "function": ("def f():\n    pass\nf()", "f:3", {1}),
    "function defined twice": ("if c:\n    def f(): pass\nelse:\n    def f(): pass\nf()", "f:5", {2, 4}),
    "recursion": ("def f():\n    f()", "f:2", {1}),
    "class": ("class A:\n    pass\nA()", "A:3", {1}),
    "global variable in a function": ("x = 1\ndef f():\n    print(x)\nx = 2", "x:3", {1, 4}),
    "local of the same name": ("x = 1\ndef f():\n    x = 2\n    print(x)", "x:4", {3}),
    "local does not leave": ("x = 1\ndef f():\n    x = 2\nprint(x)", "x:4", {1}),
    "global": ("x = 1\ndef f():\n    global x\n    x = 2\nprint(x)", "x:5", {1, 4}),
    "global read in its function": ("x = 1\ndef f():\n    global x\n    x = 2\n    print(x)", "x:5", {4}),
    "global read before": ("x = 1\ndef f():\n    global x\n    print(x)\n    x = 2", "x:4", {1, 5}),
    "global bound in a function only": ("def f():\n    global x\n    x = 2\ndef g():\n    print(x)", "x:5", {3}),
    "nonlocal": ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    g()\n    print(x)", "x:7", {2, 5}),
    "nonlocal augmented": ("def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n    return g", "n:5", {2, 5}),
    "closure": ("def f(x):\n    def g():\n        return x\n    return g", "x:3", {1}),
    "closure skips classes": ("x = 1\nclass A:\n    x = 2\n    def f(self):\n        return x", "x:5", {1}),
    "class body": ("x = 1\nclass A:\n    x = 2\n    y = x", "x:4", {3}),
    "class body, not yet": ("x = 1\nclass A:\n    y = x\n    x = 2", "x:3", {1}),
    "class body in a branch": ("x = 1\nclass A:\n    if c:\n        x = 2\n    y = x", "x:5", {1, 4}),
    "class body does not leave": ("x = 1\nclass A:\n    x = 2\nprint(x)", "x:4", {1}),
    "base class": ("B = 1\nclass A(B):\n    B = 2", "B:2", {1}),
    "match capture": ("match f():\n    case [a, b]:\n        print(a)", "a:3", {2}),
    "match, none of them": ("a = 1\nmatch f():\n    case [a]:\n        pass\nprint(a)", "a:5", {1, 3}),
    "match wildcard": ("match f():\n    case 1:\n        a = 1\n    case _:\n        a = 2\nprint(a)", "a:6", {3, 5}),
    "match rest": ("match f():\n    case {'k': 1, **rest}:\n        print(rest)", "rest:3", {2}),
    "match guard": ("match f():\n    case [a] if a:\n        print(a)", "a:2", {2}),
    "f-string": ("x = 1\nprint(f'{x}')", "x:2", {1}),
    "subscript target reads": ("x = {}\nx[0] = 1", "x:2", {1}),
    "attribute target reads": ("x = f()\nx.a = 1", "x:2", {1}),
    "attribute write binds nothing": ("x = f()\nx.a = 1\nprint(x)", "x:3", {1}),
    "loop target is an item": ("x = {}\nfor x[0] in r:\n    pass", "x:2", {1}),
    "assert": ("x = 1\nassert x", "x:2", {1}),
    "await": ("async def f(x):\n    y = await x\n    print(y)", "y:3", {2}),
    "yield": ("def f(x):\n    y = yield x\n    print(y)", "y:3", {2}),
}


@pytest.mark.parametrize(("text", "read", "wanted"), CASES.values(), ids=CASES)
def test_reaching(text: str, read: str, wanted: set[int | str]) -> None:
    asked = program(text)
    name, line, *nth = read.split(":")
    if not nth:
        found = [each for each in asked.source.parents if isinstance(each, ast.Name) and each.id == name and each.lineno == int(line)]
        reads = [each for each in found if each in asked._reaching.reads or isinstance(each.ctx, ast.Load)]
        one = reads[0]
    else:
        one = node(asked, name, int(line), int(nth[0]))
    assert lines(asked.reaching(one)) == wanted


USES: dict[str, tuple[str, int, list[int]]] = {
    "read twice": ("x = 1\nprint(x)\nprint(x)", 1, [2, 3]),
    "dead store": ("x = 1\nx = 2\nprint(x)", 1, []),
    "dead store in a loop": ("for p in r:\n    p = p.detach()", 2, []),
    "carried store": ("h = 0\nfor i in r:\n    h = f(h)", 3, [3]),
    "read in a function": ("x = 1\ndef f():\n    return x", 1, [3]),
    "read by an augmented assignment": ("x = 0\nx += 1", 1, [2]),
    "overwritten in both branches": ("x = 0\nif c:\n    x = 1\nelse:\n    x = 2\nprint(x)", 1, []),
    "overwritten in one": ("x = 0\nif c:\n    x = 1\nprint(x)", 1, [4]),
    "function": ("def f(): pass\nf()\ng = f", 1, [2, 3]),
    "import": ("import torch\nx = torch.ones(3)", 1, [2]),
    "deleted": ("x = 0\ndel x", 1, [2]),
    "read where an exception is handled": ("x = 0\ntry:\n    x = 1\n    x = 2\nexcept E:\n    print(x)", 3, [6]),
}


@pytest.mark.parametrize(("text", "line", "wanted"), USES.values(), ids=USES)
def test_uses(text: str, line: int, wanted: list[int]) -> None:
    asked = program(text)
    statement = next(each for each in asked.source.parents if isinstance(each, ast.stmt) and each.lineno == line)
    found = {read.lineno for definition in asked.defined_by(statement) for read in asked.uses(definition)}
    assert sorted(found) == wanted


def test_what_is_bound() -> None:
    asked = program("a, (b, *c) = x, (y, z)\nfor i, p in enumerate(ps):\n    pass\nwith f() as (u, v):\n    pass\nd, e = g()")
    found = {name: (ast.unparse(one.value), one.path) for name in "abcipuvde" for one in asked.definitions(name) if one.value is not None}
    assert found["a"] == ("x", ())
    assert found["c"] == ("(y, z)", (None,))
    assert found["p"] == ("enumerate(ps)", (None, 1))
    assert found["u"] == ("f()", (0,))
    assert found["e"] == ("g()", (1,))


def test_broken_and_empty_files() -> None:
    for text in ("", "def f(:\n"):
        from gradguard.analysis.program.index import Program
        from gradguard.analysis.program.syntax import Source

        asked = Program(Source("<test>", dedent(text).splitlines(True)))
        assert asked.reaching(ast.Name("x", ast.Load())) == frozenset()
        assert asked.calls("f") == []
