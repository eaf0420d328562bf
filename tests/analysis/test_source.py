"""Real scripts are run with real tensors; what was executing is captured from inside the calls, and must come back as the
very expression in the text."""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from gradguard.analysis.places import source as S
from gradguard.core.callsite import CallSite

EXACT = sys.version_info >= (3, 11)


class Script:
    """A script that was run, and where in it each torch function and each `mark(label)` was called from."""

    def __init__(self, path: Path, text: str, text_on_disk: str | None = None) -> None:
        self.path = str(path)
        self.seen: dict[str, list[CallSite]] = {}
        path.write_text(text if text_on_disk is None else text_on_disk, encoding="utf-8")
        self.names: dict[str, Any] = {"__name__": "script", "mark": self.mark, "spy": self.spy, "torch": torch}
        self.names["manager"] = lambda name: Manager(self, name)
        exec(compile(text, self.path, "exec"), self.names)

    def mark(self, label: str, *values: Any, **named: Any) -> Any:
        self.note(label)
        return values[0] if values else None

    def note(self, label: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        if frame is not None:
            self.seen.setdefault(label, []).append(CallSite(frame.f_code, frame.f_lasti))

    def spy(self, *shape: int) -> torch.Tensor:
        """A tensor that notes where in the script every operation on it stands."""
        note = self.note

        class Spy(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
                note(func.__name__)
                return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

        return torch.ones(*shape).as_subclass(Spy)

    def site(self, label: str, index: int = 0) -> S.ResolvedSite:
        assert label in self.seen, f"only saw {list(self.seen)}"
        found = S.resolve(self.seen[label][index])
        assert found is not None
        return found


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Script]:
    def start(text: str, **more: Any) -> Script:
        return Script(tmp_path / "train.py", textwrap.dedent(text).lstrip("\n"), **more)

    return start


# (what, script, whose call, facts that must come back)
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "plain call",
        "h = mark('a', 1)",
        "a",
        {
            "text": "mark('a', 1)",
            "line": 1,
            "column": 4,
            "end_column": 16,
            "targets": ["h"],
            "callee": "mark",
            "arguments": ["'a'", "1"],
            "function": "<module>",
        },
    ),
    ("inner call of two", "y = mark('f', mark('g', 2))", "g", {"text": "mark('g', 2)", "column": 14, "targets": ["y"]}),
    ("outer call of two", "y = mark('f', mark('g', 2))", "f", {"text": "mark('f', mark('g', 2))", "column": 4}),
    (
        "in-place method",
        "x = spy(3)\nx.add_(1)",
        "add_",
        {"text": "x.add_(1)", "line": 2, "receiver": "x", "callee": "x.add_", "targets": [], "inner_names": ["x"]},
    ),
    (
        "in-place method of attribute",
        "class A: pass\nself = A()\nself.m = spy(3)\nself.m.mul_(2)",
        "mul_",
        {"receiver": "self.m", "text": "self.m.mul_(2)"},
    ),
    (
        "augmented",
        "x = spy(3)\ny = torch.ones(3)\nx += y",
        "add_",
        {"text": "x += y", "receiver": "x", "targets": ["x"], "column": 0, "inner_names": ["x", "y"], "statement_names": ["x", "y"]},
    ),
    ("augmented, out of place", "total = 0\nx = spy(3)\ntotal += x", "add", {"text": "total += x", "targets": ["total"]}),
    (
        "augmented attribute",
        "class A: pass\ns = A()\ns.h = spy(3)\ns.h *= 2",
        "mul_",
        {"text": "s.h *= 2", "receiver": "s.h", "targets": ["s.h"]},
    ),
    ("augmented index", "x = spy(3)\nx[0] += 1", "__setitem__", {"text": "x[0] += 1", "receiver": "x", "targets": ["x[0]"]}),
    (
        "index assignment",
        "x = spy(3)\nx[0] = 5.",
        "__setitem__",
        {"text": "x[0] = 5.", "receiver": "x", "targets": ["x[0]"], "column": 0, "end_column": 9},
    ),
    (
        "index assignment from itself",
        "x = spy(3, 2)\nx[:, 1] = torch.relu(x[:, 1])",
        "__setitem__",
        {"text": "x[:, 1] = torch.relu(x[:, 1])", "receiver": "x", "targets": ["x[:, 1]"], "statement_names": ["x"]},
    ),
    (
        "its right-hand side",
        "x = spy(3, 2)\nx[:, 1] = torch.relu(x[:, 1])",
        "relu",
        {"text": "torch.relu(x[:, 1])", "targets": ["x[:, 1]"], "arguments": ["x[:, 1]"], "column": 10},
    ),
    ("index read", "x = spy(3, 2)\ny = x[:, 1]", "__getitem__", {"text": "x[:, 1]", "receiver": "x", "targets": ["y"]}),
    (
        "deep index assignment",
        "class A: pass\nself = A(); self.a = A()\nself.a.b = spy(3)\nself.a.b[...] = torch.zeros(3)",
        "__setitem__",
        {"receiver": "self.a.b", "targets": ["self.a.b[...]"], "line": 4},
    ),
    ("slice assignment", "x = spy(4)\nx[1:3] = 0", "__setitem__", {"text": "x[1:3] = 0", "receiver": "x"}),
    (
        "attribute assignment",
        "x = spy(3)\nx.data = torch.zeros(3)",
        "__set__",
        {"text": "x.data = torch.zeros(3)", "receiver": "x", "targets": ["x.data"]},
    ),
    ("attribute read", "x = spy(3)\ny = x.data", "__get__", {"text": "x.data", "receiver": "x", "targets": ["y"]}),
    ("operator", "x = spy(3)\nz = 1 + (x * 2)", "mul", {"text": "x * 2", "column": 9, "targets": ["z"]}),
    ("comparison", "x = spy(3)\nmask = x > 2", "gt", {"text": "x > 2", "targets": ["mask"]}),
    ("sign", "x = spy(3)\nmask = 2 * -x", "neg", {"text": "-x"}),
    ("detach", "h = spy(3)\nstate = h.detach()", "detach", {"text": "h.detach()", "receiver": "h", "targets": ["state"]}),
    (
        "function of a module",
        "import torch.nn.functional as F\nx = spy(3)\ny = F.relu(x, inplace=True)",
        "relu",
        {
            "text": "F.relu(x, inplace=True)",
            "receiver": "x",
            "callee": "F.relu",
            "callee_full_name": "torch.nn.functional.relu",
            "keywords": {"inplace": "True"},
            "arguments": ["x", "inplace=True"],
            "inner_names": ["x"],
        },
    ),
    (
        "out=",
        "a = spy(3)\nbuffer = torch.ones(3)\nimport torch\ntorch.add(a, 1, out=buffer)",
        "add",
        {"receiver": "buffer", "keywords": {"out": "buffer"}, "inner_names": ["a", "buffer"]},
    ),
    (
        "chain over lines, middle",
        "x = spy(2, 2)\nh = (x\n     .exp()\n     .mul_(2)\n     .sum())",
        "mul_",
        {"text": "x\n     .exp()\n     .mul_(2)", "line": 2, "end_line": 4, "column": 5, "targets": ["h"], "receiver": "x.exp()"},
    ),
    (
        "chain over lines, end",
        "x = spy(2, 2)\nh = (x\n     .exp()\n     .sum())",
        "sum",
        {"line": 2, "end_line": 4, "end_column": 11, "callee": "x.exp().sum"},
    ),
    (
        "call over lines",
        "h = mark(\n    'a',\n    1,\n    key=2,\n)",
        "a",
        {"line": 1, "end_line": 5, "end_column": 1, "arguments": ["'a'", "1", "key=2"], "column": 4},
    ),
    (
        "after non-ASCII",
        "größe = spy(3)\nname, y = 'é→', größe.add_(1)",
        "add_",
        {"text": "größe.add_(1)", "column": 16, "end_column": 29, "receiver": "größe", "targets": ["y"]},
    ),
    ("after a tab", "x = spy(3)\nif True:\n\tx.add_(1)", "add_", {"column": 1, "text": "x.add_(1)", "is_conditional": True}),
    ("second of two on a line", "x = spy(3); x.mul_(2); x.add_(1)", "add_", {"text": "x.add_(1)", "column": 23}),
    ("unpacking", "a, (b, *c) = mark('f', (1, (2, 3)))", "f", {"targets": ["a", "b", "c"]}),
    ("unpacking a tensor", "x = spy(2)\na, b = x", "unbind", {"text": "x", "targets": ["a", "b"], "line": 2}),
    ("pairwise", "a, b = mark('f', 1), mark('g', 2)", "g", {"targets": ["b"], "text": "mark('g', 2)"}),
    ("two targets", "a = b = mark('f', 1)", "f", {"targets": ["a", "b"]}),
    ("annotated", "a: int = mark('f', 1)", "f", {"targets": ["a"]}),
    ("walrus", "if (n := mark('f', 1)) > 0:\n    pass", "f", {"targets": ["n"], "text": "mark('f', 1)"}),
    ("argument", "xs = []\nxs.append(mark('f', 1))", "f", {"targets": []}),
    ("index in a target", "x = torch.zeros(3)\nx[mark('f', 1)] = 2", "f", {"targets": [], "text": "mark('f', 1)"}),
    ("return", "def step(x):\n    return mark('f', x) + 1\nstep(1)", "f", {"returned": True, "targets": [], "function": "step", "line": 2}),
    ("not returned", "def step(x):\n    y = mark('f', x) + 1\n    return y\nstep(1)", "f", {"returned": False, "targets": ["y"]}),
    (
        "yield",
        "def stream():\n    yield mark('f', 1)\nlist(stream())",
        "f",
        {"returned": True, "function": "stream", "text": "mark('f', 1)"},
    ),
    ("received from yield", "def stream():\n    got = yield mark('f', 1)\nlist(stream())", "f", {"returned": True, "targets": []}),
    ("lambda", "f = lambda x: mark('f', x)\nf(1)", "f", {"text": "mark('f', x)", "returned": True, "targets": [], "function": "<lambda>"}),
    (
        "one of two lambdas on a line",
        "f, g = (lambda x: mark('f', x)), (lambda x: mark('g', x))\nf(1); g(1)",
        "g",
        {"column": 44, "text": "mark('g', x)"},
    ),
    (
        "list comprehension",
        "def step(xs):\n    hs = [mark('f', x) for x in xs]\n    return hs\nstep([1])",
        "f",
        {"text": "mark('f', x)", "targets": ["hs"], "function": "step", "inner_names": ["mark", "x"]},
    ),
    (
        "generator expression",
        "class A:\n    def step(self, xs):\n        total = sum(mark('f', x) for x in xs)\nA().step([1])",
        "f",
        {"function": "A.step", "targets": ["total"], "line": 3},
    ),
    ("dict comprehension", "d = {k: mark('f', k) for k in [1]}", "f", {"function": "<module>", "targets": ["d"], "text": "mark('f', k)"}),
    ("for over a call", "for i, row in mark('f', [(1, 2)]):\n    pass", "f", {"targets": ["i", "row"], "text": "mark('f', [(1, 2)])"}),
    (
        "for over a tensor",
        "scores = spy(2)\nfor row in scores:\n    pass",
        "unbind",
        {"text": "scores", "line": 2, "end_line": 2, "column": 11, "targets": ["row"]},
    ),
    ("comprehension over a tensor", "scores = spy(2)\nrows = [row for row in scores]", "unbind", {"text": "scores", "targets": ["rows"]}),
    ("f-string", "x = spy(1)\ns = f'lösung {x.item():.2f} of {1}'", "item", {"text": "x.item()", "column": 14}),
    (
        "method",
        "class Net:\n    def forward(self, x):\n        h = mark('f', x)\n        return h\nNet().forward(1)",
        "f",
        {"function": "Net.forward", "targets": ["h"]},
    ),
    (
        "inner function",
        "def outer():\n    def inner():\n        return mark('f')\n    return inner()\nouter()",
        "f",
        {"function": "outer.<locals>.inner"},
    ),
    (
        "decorated function",
        "def keep(f): return f\n@keep\n@keep\ndef step():\n    return mark('f')\nstep()",
        "f",
        {"function": "step", "line": 5, "text": "mark('f')"},
    ),
    (
        "decorator",
        "def keep(label):\n    mark(label)\n    return lambda f: f\n@keep('f')\ndef step(): pass",
        "f",
        {"function": "keep", "line": 2},
    ),
    (
        "with",
        "with manager('m'), manager('n'):\n    mark('body')",
        "body",
        {"line": 2, "text": "mark('body')"},
    ),
    (
        "private name",
        "class C:\n    def go(self):\n        self.__x = spy(2)\n        self.__x.add_(1)\nC().go()",
        "add_",
        {"text": "self.__x.add_(1)", "receiver": "self.__x"},
    ),
    ("short circuit", "ok = True and mark('f', 1)", "f", {"is_conditional": True, "targets": ["ok"]}),
    ("unconditional", "ok = mark('f', 1) if mark('test', 1) else 0", "test", {"is_conditional": False}),
    (
        "starred",
        "a, k = [1], {'z': 2}\ny = mark('f', *a, **k)",
        "f",
        {"arguments": ["'f'", "*a", "**k"], "keywords": {}, "inner_names": ["mark", "a", "k"]},
    ),
    (
        "names",
        "import math\nclass A: pass\nself = A()\nself.cell = self.memory = lambda *a, **k: 1\nh = [1]\n"
        "y = mark('f', self.cell(self.memory, h[0]), str(math.pi), k=[u for u in h])",
        "f",
        {"inner_names": ["mark", "self.cell", "self.memory", "h"]},
    ),
    ("assert", "x = spy(2)\nassert x.sum() > 0", "sum", {"text": "x.sum()", "column": 7}),
]


# without columns (Python 3.10) two calls alike on one line are not told apart
NEEDS_COLUMNS = {"one of two lambdas on a line"}


@pytest.mark.parametrize(("text", "label", "facts"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_expression(request: pytest.FixtureRequest, run: Callable[..., Script], text: str, label: str, facts: dict[str, Any]) -> None:
    if not EXACT and request.node.callspec.id in NEEDS_COLUMNS:
        pytest.skip("needs columns")
    site = run(text).site(label)
    assert {name: getattr(site, name) for name in facts} == facts
    assert site.exact and site.statement is not None
    span = site.span("here", "culprit")
    assert (span.line, span.column, span.text, span.label, span.role) == (site.line, site.column, site.text, "here", "culprit")


class Manager:
    """Notes who enters and leaves it."""

    def __init__(self, script: Script, name: str) -> None:
        self.script, self.name = script, name

    def __enter__(self) -> None:
        self.script.note(f"{self.name} in")

    def __exit__(self, *exc: object) -> None:
        self.script.note(f"{self.name} out")

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *exc: object) -> None:
        pass


def test_with_items(run: Callable[..., Script]) -> None:
    script = run("""
        with manager('one') as c, manager('two') as d:
            pass
        with manager('three'):
            pass
    """)
    sites = {label: script.site(label) for label in script.seen}
    facts = {label: (site.text, site.targets) for label, site in sites.items()}
    assert facts["two in"] == ("manager('two')", ["d"]) and facts["one in"] == ("manager('one')", ["c"])
    assert facts["three in"] == ("manager('three')", []) and facts["three out"] == ("manager('three')", [])
    assert sites["two out"].line == 1 and isinstance(sites["two out"].statement, ast.With)


def test_blocks_around(run: Callable[..., Script]) -> None:
    script = run("""
        class Net:
            @torch.no_grad()
            @staticmethod
            def forward(xs):
                with torch.enable_grad(), torch.autocast('cpu', enabled=False):
                    for i in xs:
                        while True:
                            with torch.no_grad() as off:
                                h = mark('deep', i)
                            break
                        else:
                            mark('else')
                    mark('after')
                with mark('item', torch.enable_grad()):
                    pass
        with torch.enable_grad():
            Net.forward([1])
    """)
    deep = script.site("deep")
    assert [(block.text, block.line) for block in deep.enclosing_withs()] == [
        ("torch.no_grad()", 8), ("torch.autocast('cpu', enabled=False)", 5), ("torch.enable_grad()", 5),
    ]  # fmt: skip
    assert deep.enclosing_withs()[1].span.column == 34
    assert [(block.text, block.line) for block in deep.decorators()] == [("torch.no_grad()", 2), ("staticmethod", 3)]
    assert [type(loop) for loop in deep.enclosing_loops] == [ast.While, ast.For]
    assert deep.enclosing_loops[1].lineno == 6
    assert deep.enclosing_class is not None and deep.enclosing_class.name == "Net"
    assert isinstance(deep.enclosing_function, ast.FunctionDef) and deep.enclosing_function.name == "forward"
    assert script.site("after").enclosing_loops == [] and len(script.site("after").enclosing_withs()) == 2
    assert script.site("item").enclosing_withs() == []
    assert deep.statement_span().text == "h = mark('deep', i)"
    assert script.site("item").statement_span("with").text == "with mark('item', torch.enable_grad())"


def test_function_def_is_found_behind_decorators(run: Callable[..., Script]) -> None:
    script = run("""
        def keep(f): return f
        @keep
        def step(x, flag=True):
            return [x for x in range(3)]
        pair = (lambda a: a, lambda b: b)
    """)
    step = S.function_def(script.names["step"].__code__)
    assert isinstance(step, ast.FunctionDef) and step.lineno == 3
    inner = [constant for constant in script.names["step"].__code__.co_consts if isinstance(constant, CodeType)]
    assert all(S.function_def(code) is step for code in inner)
    second = S.function_def(script.names["pair"][1].__code__)
    assert isinstance(second, ast.Lambda) and second.args.args[0].arg == "b"
    assert S.function_def(compile("1", "nowhere.py", "exec")) is None


def test_traceback(run: Callable[..., Script]) -> None:
    script = run("""
        def step(x, y):
            h = x + 1
            return torch.cat([h @ y, h.sum()])
    """)
    try:
        script.names["step"](torch.ones(2, 3), torch.ones(4, 4))
    except RuntimeError as error:
        assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
        site = S.from_traceback(error.__traceback__.tb_next)
    assert site is not None and site.text == "h @ y" and site.returned and site.function == "step"


def test_no_source() -> None:
    seen: list[S.ResolvedSite | None] = []
    exec("def f():\n    look()\n\nf()", {"look": lambda: seen.append(S.from_frame(sys._getframe(1)))})
    (site,) = seen
    assert site is not None and (site.file, site.line, site.function) == ("<string>", 2, "f")
    assert site.text is None and site.node is None and not site.exact
    assert site.targets == [] and site.inner_names == [] and site.enclosing_withs() == [] and site.decorators() == []
    assert site.receiver is None and site.callee is None and not site.returned and site.enclosing_function is None
    assert site.statement_span().line == 2 and site.span().column is None
    assert S.resolve(None) is None and S.module_ast("no/such/file.py") is None and S.at_line("no/such/file.py", 3) is None
    assert S.span_of("no/such/file.py", ast.parse("x = 1").body[0]).line == 1


def test_notebook_cell() -> None:
    name = "<ipython-input-3-cafe>"
    text = "h = 3\nz = look(h,\n         2)\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    seen: list[S.ResolvedSite | None] = []
    try:
        exec(compile(text, name, "exec"), {"look": lambda *values: seen.append(S.from_frame(sys._getframe(1)))})
        assert seen[0] is not None and seen[0].targets == ["z"] and seen[0].end_line == 3 and seen[0].arguments == ["h", "2"]
    finally:
        del linecache.cache[name]


@pytest.mark.parametrize(
    "edited",
    [
        "# a comment at the top\n\n\ndef step(x):\n    return mark('f', x)\n",
        "def step(x):\n    return work('f', x)\n",
        "def other(x):\n    return mark('f', x)\n",
        "def step(x):\n    y = 1\n    return mark('f', x)\n",
        "def step(x:\n    return mark('f', x)\n",
        "",
    ],
    ids=["moved", "renamed call", "renamed function", "line put in", "syntax error", "emptied"],
)
def test_edited_since(run: Callable[..., Script], edited: str) -> None:
    script = run("def step(x):\n    return mark('f', x)\nstep(1)\n", text_on_disk=edited)
    site = script.site("f")
    assert (site.line, site.function) == (2, "step")
    assert site.column is None and site.text is None and site.node is None and site.targets == []


@pytest.mark.skipif(not EXACT, reason="without columns the calls that pytest adds hide which is which: only the statement is known")
def test_asserts_that_pytest_has_rewritten() -> None:
    seen: list[S.ResolvedSite | None] = []

    def look(value: int) -> int:
        seen.append(S.from_frame(sys._getframe(1)))
        return value

    # fmt: off
    assert look(1) + look(
        1
    ) == 2
    # fmt: on
    assert [site.arguments if site else None for site in seen] == [["1"], ["1"]]
    assert seen[1] is not None and seen[1].end_line == seen[1].line + 2
    assert seen[1].function == "test_asserts_that_pytest_has_rewritten"


def test_coroutine(run: Callable[..., Script]) -> None:
    script = run("""
        async def fetch(): return mark('inside')
        async def step():
            batch = await fetch()
            async with manager('m') as m:
                rows = [await fetch() for _ in mark('rows', [1])]
            return mark('end', rows)
        try:
            step().send(None)
        except StopIteration: pass
    """)
    assert script.site("end").returned and script.site("end").function == "step"
    assert script.site("rows").targets == ["rows"] and [block.text for block in script.site("rows").enclosing_withs()] == ["manager('m')"]


def test_file_is_read_again_after_an_edit(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x = 1\n")
    first = S.module_ast(str(path))
    assert first is not None and S.module_ast(str(path)) is first
    path.write_text("x = 1\nyy = 22\n")
    second = S.module_ast(str(path))
    assert second is not None and len(second.body) == 2


def test_at_line(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        textwrap.dedent("""
        @deco
        def step(model, x):
            # a comment

            with torch.no_grad():
                y = model(
                    x)
            y += 1
            x[0] = y
            if y: return y
            loss.backward()
    """).lstrip()
    )
    at = {line: S.at_line(str(path), line) for line in range(1, 13)}
    facts = {line: (site.text, site.line, site.targets) for line, site in at.items() if site is not None}
    assert facts[2] == ("def step(model, x", 2, []) and facts[1][1] == 2
    assert at[3] is None and at[4] is None and at[12] is None
    assert facts[5] == ("with torch.no_grad()", 5, [])
    assert facts[6] == facts[7] == ("y = model(\n            x)", 6, ["y"])
    assert facts[8] == ("y += 1", 8, ["y"]) and facts[9] == ("x[0] = y", 9, ["x[0]"])
    assert facts[10][0] == "return y" and at[10] is not None and at[10].returned
    last = at[11]
    assert last is not None and last.callee == "loss.backward" and last.receiver == "loss" and last.function == "step"
    assert at[9] is not None and at[9].receiver == "x" and [b.text for b in at[6].enclosing_withs()] == ["torch.no_grad()"]  # type: ignore[union-attr]


def test_assignments_and_uses(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        textwrap.dedent("""
        h = None
        class Net:
            def __init__(self):
                self.h = 0
            def forward(self, x):
                h = x
                self.h, z = h, 1
                for h in x: pass
                with x as h: h.go()
                h += self.h
                if (h := 2): pass
                h[0] = 1
                return [h for h in x], lambda h: h, lambda: h
        def reset():
            global h
            h = 1
    """).lstrip()
    )
    tree = S.module_ast(str(path))
    assert tree is not None
    assert [statement.lineno for statement in S.assignments_to(tree, "h")] == [1, 16]
    assert [statement.lineno for statement in S.assignments_to(tree, "self.h")] == [4, 7]
    forward = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward")
    assert [statement.lineno for statement in S.assignments_to(forward, "h")] == [6, 8, 9, 10, 11]
    assert [statement.lineno for statement in S.assignments_to(forward, "h[0]")] == [12]
    assert [(use.lineno, use.col_offset) for use in S.uses_of(forward, "h")] == [(7, 20), (9, 21), (12, 8), (13, 52)]
    assert [use.lineno for use in S.uses_of(tree, "self.h")] == [10]
    use = S.uses_of(forward, "h")[0]
    assert S.segment(str(path), use) == "h" and isinstance(S.parent_of(str(path), use), ast.Tuple)
    span = S.span_of(str(path), use, "read here", "saved")
    assert (span.line, span.column, span.end_column, span.function, span.label) == (7, 20, 21, "Net.forward", "read here")


@pytest.mark.skipif(not EXACT, reason="columns are always missing there")
def test_without_columns(tmp_path: Path) -> None:
    """Code compiled without column tables (3.10, or -X no_debug_ranges) is still matched where the statement leaves no doubt."""
    text = "y = mark('f', mark('g', 2)) + 1\nx = spy(3)\nx += y\nx[0] = mark('h', 1); x[1] = 2\n"
    script = Script(tmp_path / "train.py", text)
    script.seen.clear()
    code = compile(text, script.path, "exec")
    exec(code.replace(co_linetable=_lines_only(code)), script.names)
    assert (script.site("g").text, script.site("f").text) == ("mark('g', 2)", "mark('f', mark('g', 2))")
    assert script.site("f").targets == ["y"] and script.site("add_").text == "x += y" and script.site("add_").receiver == "x"
    assert script.site("h").line == 4


def _lines_only(code: CodeType) -> bytes:
    """The line table with the columns left out: entries of kind 13, a line delta and no more (CPython, Objects/locations.md)."""
    table, previous = bytearray(), code.co_firstlineno
    for start, end, line in code.co_lines():
        units = (end - start) // 2
        while units:
            length = min(units, 8)
            units -= length
            if line is None:
                table.append(0x80 | 15 << 3 | length - 1)
                continue
            delta, previous = line - previous, line
            number = (-delta << 1 | 1) if delta < 0 else delta << 1
            table.append(0x80 | 13 << 3 | length - 1)
            while number > 63:
                table.append(64 | number & 63)
                number >>= 6
            table.append(number)
    return bytes(table)
