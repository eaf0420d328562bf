"""Loops, conditions, functions, classes and grad modes around a node; every program marks the node by the call `here()`."""

from __future__ import annotations

import ast

import pytest

from tests.analysis.program.programs import node, program

LOOPS: dict[str, tuple[str, list[str]]] = {
    "none": ("here()", []),
    "for": ("for i in r:\n    here()", ["i"]),
    "nested": ("for i in r:\n    for j in q:\n        here()", ["j", "i"]),
    "while": ("while c:\n    here()", ["c"]),
    "while test": ("while here():\n    pass", ["here()"]),
    "iterable runs once": ("for i in here():\n    pass", []),
    "iterable of an inner loop": ("for i in r:\n    for j in here():\n        pass", ["i"]),
    "else runs once": ("for i in r:\n    pass\nelse:\n    here()", []),
    "comprehension": ("[here() for i in r]", ["i"]),
    "comprehension of two": ("[here() for i in r for j in q]", ["j", "i"]),
    "comprehension's iterable": ("[i for i in here()]", []),
    "comprehension's second iterable": ("[j for i in r for j in here()]", ["i"]),
    "comprehension's filter": ("[i for i in r if here()]", ["i"]),
    "function inside a loop": ("for i in r:\n    def f():\n        here()", []),
    "default inside a loop": ("for i in r:\n    def f(x=here()):\n        pass", ["i"]),
    "lambda inside a loop": ("for i in r:\n    f = lambda: here()", []),
    "under if and with": ("for i in r:\n    if c:\n        with w:\n            here()", ["i"]),
}


@pytest.mark.parametrize(("text", "wanted"), LOOPS.values(), ids=LOOPS)
def test_loops(text: str, wanted: list[str]) -> None:
    asked = program(text)
    found = asked.loops(node(asked, "here()"))
    assert [ast.unparse(loop.test if isinstance(loop, ast.While) else loop.target) for loop in found] == wanted


CONDITIONS: dict[str, tuple[str, list[tuple[str, bool]]]] = {
    "none": ("here()", []),
    "if": ("if a:\n    here()", [("a", True)]),
    "else": ("if a:\n    pass\nelse:\n    here()", [("a", False)]),
    "elif": ("if a:\n    pass\nelif b:\n    here()", [("b", True), ("a", False)]),
    "test itself": ("if here():\n    pass", []),
    "nested": ("if a:\n    if b:\n        here()", [("b", True), ("a", True)]),
    "conditional expression": ("x = here() if a else 1", [("a", True)]),
    "conditional expression, else": ("x = 1 if a else here()", [("a", False)]),
    "and": ("x = a and here()", [("a", True)]),
    "or": ("x = a or b or here()", [("b", False), ("a", False)]),
    "first of and": ("x = here() and a", []),
    "while": ("while a:\n    here()", [("a", True)]),
    "filter": ("[here() for i in r if i]", [("i", True)]),
    "early return": ("def f():\n    if a:\n        return\n    here()", [("a", False)]),
    "early continue": ("for i in r:\n    if i:\n        continue\n    here()", [("i", False)]),
    "early raise in else": ("if a:\n    pass\nelse:\n    raise E\nhere()", [("a", True)]),
    "both leave": ("def f():\n    if a:\n        return\n    else:\n        return\n    here()", []),
    "early return under an outer block": ("def f():\n    if a:\n        return\n    with w:\n        here()", [("a", False)]),
    "assert": ("assert a\nhere()", [("a", True)]),
    "assert afterwards": ("here()\nassert a", []),
    "match guard": ("match v:\n    case x if x:\n        here()", [("x", True)]),
    "function under if": ("if a:\n    def f():\n        here()", []),
    "branch that may leave": ("def f():\n    if a:\n        if b:\n            return\n    here()", []),
}


@pytest.mark.parametrize(("text", "wanted"), CONDITIONS.values(), ids=CONDITIONS)
def test_conditions(text: str, wanted: list[tuple[str, bool]]) -> None:
    asked = program(text)
    assert [(ast.unparse(each.test), each.holds) for each in asked.conditions(node(asked, "here()"))] == wanted


MODES: dict[str, tuple[str, set[str]]] = {
    "module": ("here()", {"grad"}),
    "with": ("with torch.no_grad():\n    here()", {"no_grad"}),
    "imported": ("from torch import no_grad\nwith no_grad():\n    here()", {"no_grad"}),
    "inner one wins": ("with torch.no_grad():\n    with torch.enable_grad():\n        here()", {"grad"}),
    "inference": ("with torch.inference_mode():\n    here()", {"inference"}),
    "inference off": ("with torch.inference_mode(False):\n    here()", {"grad"}),
    "set off": ("with torch.set_grad_enabled(False):\n    here()", {"no_grad"}),
    "set by keyword": ("with torch.set_grad_enabled(mode=False):\n    here()", {"no_grad"}),
    "set by a variable": ("with torch.set_grad_enabled(train):\n    here()", {"unknown"}),
    "set by a statement": ("torch.set_grad_enabled(False)\nhere()", {"no_grad"}),
    "set and put back": ("torch.set_grad_enabled(False)\ntorch.set_grad_enabled(True)\nhere()", {"grad"}),
    "second item": ("with open(f), torch.no_grad():\n    here()", {"no_grad"}),
    "other manager": ("with torch.autocast('cuda'):\n    here()", {"grad"}),
    "after the block": ("with torch.no_grad():\n    pass\nhere()", {"grad"}),
    "decorator": ("@torch.no_grad()\ndef f():\n    here()", {"no_grad"}),
    "decorator without a call": ("@torch.no_grad\ndef f():\n    here()", {"no_grad"}),
    "called under no_grad": ("def f():\n    here()\nwith torch.no_grad():\n    f()", {"no_grad"}),
    "called both ways": ("def f():\n    here()\nf()\nwith torch.no_grad():\n    f()", {"grad", "no_grad"}),
    "called from a function under no_grad": ("def f():\n    here()\ndef g():\n    f()\nwith torch.no_grad():\n    g()", {"no_grad"}),
    "never called here": ("def f():\n    here()", {"unknown"}),
    "handed on": ("def f():\n    here()\nf()\nuse(f)", {"grad", "unknown"}),
    "not torch's": ("from mine import no_grad\nwith no_grad():\n    here()", {"grad"}),
}


@pytest.mark.parametrize(("text", "wanted"), MODES.values(), ids=MODES)
def test_grad_mode(text: str, wanted: set[str]) -> None:
    asked = program("import torch\n" + text)
    assert asked.grad_mode(node(asked, "here()")) == wanted


def test_function_and_class() -> None:
    asked = program(
        """
        class A:
            x = one()

            def f(self, y=two()):
                three()
                g = lambda: four()
                class B:
                    z = five()
        """
    )
    around = {name: asked.function(node(asked, f"{name}()")) for name in ("one", "two", "three", "four", "five")}
    names = {name: getattr(each, "name", each and "lambda") for name, each in around.items()}
    assert names == {"one": None, "two": None, "three": "f", "four": "lambda", "five": "f"}
    assert {name: asked.cls(node(asked, f"{name}()")).name for name in around} == dict.fromkeys(around, "A") | {"five": "B"}  # type: ignore[union-attr]
