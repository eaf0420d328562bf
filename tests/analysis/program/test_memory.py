"""Which memory an expression is, and what statements write into it."""

from __future__ import annotations

import ast

import pytest

from gradguard.analysis.program.memory import bases, iterated, memory_writes, peel, statements_of
from gradguard.torch_compat.op_schemas import factory_names, is_in_place, view_names
from tests.analysis.program.programs import lines, node, program

PEELED: dict[str, tuple[str, str, list[str]]] = {
    "method": ("x.view(-1)", "x", ["view"]),
    "chain": ("x.detach().T[0]", "x", ["[]", "T", "detach"]),
    "function": ("torch.squeeze(x, 0)", "x", ["squeeze"]),
    "in place": ("x.add_(1).mul_(2)", "x", ["mul_", "add_"]),
    "item of an attribute": ("self.rows[i]", "self.rows", ["[]"]),
    "conversion that may share": ("x.half()", "x", ["half"]),
    "items of a loop": ("enumerate(rows)", "rows", ["for"]),
    "new memory": ("x.exp()", "x.exp()", []),
    "a dict's values": ("table.values()", "table.values()", []),
}


@pytest.mark.parametrize(("text", "base", "calls"), PEELED.values(), ids=PEELED)
def test_peel(text: str, base: str, calls: list[str]) -> None:
    found, through = peel(ast.parse(text, mode="eval").body)
    assert (ast.unparse(found), through) == (base, calls)


def test_what_torch_says_of_its_functions() -> None:
    assert {"view", "narrow", "unbind", "expand", "T", "from_numpy"} <= view_names()
    assert not {"clone", "add", "add_", "values", "keys", "matmul"} & view_names()
    assert {"zeros", "randn", "arange", "randperm", "full", "normal", "tril_indices"} <= factory_names()
    assert not {"zeros_like", "new_zeros", "cat", "to", "clone"} & factory_names()
    assert is_in_place("add_") and is_in_place("_foreach_mul_")
    assert not any(map(is_in_place, ("__init__", "clip_grad_norm_", "add")))


BASES: dict[str, tuple[str, str, set[int]]] = {
    "a view": ("x = f()\ny = x.view(-1)\ny[0]", "y[0]", {1}),
    "either branch": ("x = f()\nz = g()\nif c:\n    y = x[0]\nelse:\n    y = z.t()\ny", "y", {1, 2}),
    "an in-place operator": ("x = f()\nx += 1\nx", "x", {1}),
    "a parameter": ("def f(x):\n    y = x.T\n    return y", "y", {1}),
    "not what it is a copy of": ("x = f()\ny = x.clone()\ny", "y", {2}),
}


@pytest.mark.parametrize(("text", "expr", "wanted"), BASES.values(), ids=BASES)
def test_bases(text: str, expr: str, wanted: set[int]) -> None:
    asked = program(text)
    last = max((each for each in asked.source.parents if isinstance(each, ast.expr) and ast.unparse(each) == expr), key=lambda e: e.lineno)
    assert lines(bases(asked, last)) == wanted


WRITES: dict[str, tuple[str, list[str]]] = {
    "item": ("x[0] = 1", ["x[0]"]),
    "one of several targets": ("a, x[0] = 1, 2", ["x[0]"]),
    "operator": ("x += 1", ["x"]),
    "method": ("y = x.add_(1)", ["x"]),
    "out": ("torch.add(a, b, out=x)", ["x"]),
    "out, a tuple": ("torch.max(a, 0, out=(x, i))", ["x", "i"]),
    "flag": ("F.relu(x, inplace=True)", ["x"]),
    "flag, off": ("F.relu(x, inplace=False)", []),
    "function of torch": ("torch.relu_(x)", ["x"]),
    "no values": ("x.requires_grad_()", []),
    "no tensor's method": ("self.helper_(x)", []),
    "header only": ("for i in x.add_(1):\n    y += 1", ["x"]),
}


@pytest.mark.parametrize(("text", "wanted"), WRITES.values(), ids=WRITES)
def test_memory_writes(text: str, wanted: list[str]) -> None:
    asked = program("import torch\n" + text)
    assert [ast.unparse(write.written) for write in memory_writes(asked.source, asked.source.tree.body[1])] == wanted  # type: ignore[union-attr]


ITERATED: dict[str, tuple[str, str, str | None]] = {
    "plainly": ("for a in rows: pass", "a", "rows"),
    "enumerate": ("for i, a in enumerate(rows): pass", "a", "rows"),
    "a counter": ("for i, a in enumerate(rows): pass", "i", None),
    "zip": ("for a, b in zip(rows, cols): pass", "b", "cols"),
    "zip in enumerate": ("for i, (a, b) in enumerate(zip(rows, cols)): pass", "b", "cols"),
    "starred": ("for a, b in zip(*both): pass", "a", None),
    "of another loop": ("for a in rows: pass", "b", None),
    "unpacked": ("for name, p in net.named_parameters(): pass", "p", "net.named_parameters()"),
}


@pytest.mark.parametrize(("text", "name", "wanted"), ITERATED.values(), ids=ITERATED)
def test_iterated(text: str, name: str, wanted: str | None) -> None:
    found = iterated(ast.parse(text).body[0], name)  # type: ignore[arg-type]
    assert (None if found is None else ast.unparse(found)) == wanted


def test_statements_of_a_scope_leave_out_inner_functions() -> None:
    asked = program("def f():\n    a = 1\n    def g():\n        b = 2\n    if a:\n        c = 3")
    assert [ast.unparse(each) for each in statements_of(asked.source.tree.body[0])][0::2] == ["a = 1", "c = 3"]  # type: ignore[union-attr]
    assert node(asked, "b = 2") not in statements_of(asked.source.tree.body[0])  # type: ignore[union-attr]
