"""Statements removed, moved, repeated, detached: what comes out, and where there is no patch rather than a doubtful one."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gradguard.analysis.places.source import ResolvedSite, at_line
from gradguard.fixes import at_places
from tests.running import applied

Patch = Callable[[Callable[[str], ResolvedSite]], "str | None"]


def result(folder: Path, text: str, patch: Patch) -> str | None:
    """The text with the patch that is made for places, each named by a piece of its line."""
    text = textwrap.dedent(text)
    file = folder / "train.py"
    file.write_text(text)

    def place(piece: str) -> ResolvedSite:
        (line,) = (number for number, each in enumerate(text.splitlines(), 1) if piece in each)
        found = at_line(str(file), line)
        assert found is not None
        statement = found.statement
        if isinstance(statement, ast.Expr):
            found.node = statement.value
        return found

    diff = patch(place)
    if diff is None:
        return None
    changed = applied(text, diff)
    ast.parse(changed)
    return changed


LOOP = """
    for epoch in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch)  # kept
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(epoch)
    optimizer = make(model)
    model, loader, scheduler = build()
    clipped = 1
    clip(clipped)
    optimizer = make(loader.parameters)
"""


@pytest.mark.parametrize(
    ("patch", "before", "after"),
    [
        (lambda at: at_places.taken_out(at("zero_grad")), "        optimizer.zero_grad()\n", ""),
        (
            lambda at: at_places.put_before(at("backward"), "optimizer.check()"),
            "        loss.b",
            "        optimizer.check()\n        loss.b",
        ),
        (
            lambda at: at_places.put_after(at("# kept"), "model.eval()"),
            "model(batch)  # kept\n",
            "model(batch)  # kept\n        model.eval()\n",
        ),
        (
            lambda at: at_places.put_around(at("# kept"), "model.eval()", "model.train()"),
            "        loss = model(batch)  # kept\n",
            "        model.eval()\n        loss = model(batch)  # kept\n        model.train()\n",
        ),
        (
            lambda at: at_places.brought_after(at("zero_grad"), at("optimizer.step")),
            "        optimizer.zero_grad()\n        loss = model(batch)  # kept\n        loss.backward()\n        optimizer.step()\n",
            "        loss = model(batch)  # kept\n        loss.backward()\n        optimizer.step()\n        optimizer.zero_grad()\n",
        ),
        (
            lambda at: at_places.brought_before(at("scheduler.step"), at("optimizer.step")),
            "        optimizer.step()\n        scheduler.step()\n",
            "        scheduler.step()\n        optimizer.step()\n",
        ),
        (
            lambda at: at_places.out_of_the_loop(at("scheduler.step")),
            "        scheduler.step()\n    print",
            "    scheduler.step()\n    print",
        ),
        (
            lambda at: at_places.repeated_after(at("make(model)"), at("= build")),
            "= build()\n",
            "= build()\noptimizer = make(model)\n",
        ),
        (lambda at: at_places.repeated_after(at("make(loader"), at("# kept")), None, None),  # what it makes has nothing to do with that
        (lambda at: at_places.brought_before(at("clip("), at("= build")), None, None),  # what it reads is not there yet
        (lambda at: at_places.kept_detached([at("# kept")]), "model(batch)", "model(batch).detach()"),
        (lambda at: at_places.put_before(at("backward"), "Adam.step()"), None, None),  # no variable of the program
        (lambda at: at_places.put_before(at("backward"), "the optimizer.step()"), None, None),
        (lambda at: at_places.taken_out(at("# kept")), None, None),  # what it computes is used
        (lambda at: at_places.brought_after(at("zero_grad"), at("zero_grad")), None, None),
    ],
)
def test_of_a_loop(patch: Patch, before: str | None, after: str | None, tmp_path: Path) -> None:
    found = result(tmp_path, LOOP, patch)
    assert found == (None if before is None or after is None else textwrap.dedent(LOOP).replace(before, after))


@pytest.mark.parametrize(
    ("text", "patch", "expected"),
    [
        ("if x:\n    optimizer.step()\n", lambda at: at_places.taken_out(at("step")), "if x:\n    pass\n"),
        ("a = 1; optimizer.step()\n", lambda at: at_places.taken_out(at("a = 1")), None),
        ("for x in y:\n    scheduler.step()\n", lambda at: at_places.out_of_the_loop(at("step")), None),
        ("for x in y:\n    f(x)\n    scheduler.step()\n", lambda at: at_places.out_of_the_loop(at("step")), None),  # there is no outer loop
        ("def f(model):\n    return model(1)\n", lambda at: at_places.put_around(at("return"), "model.eval()", "model.train()"), None),
        ("def f(model):\n    return model(1)\n", lambda at: at_places.put_after(at("return"), "model.train()"), None),
        ("kept.append(a + b)\n", lambda at: at_places.kept_detached([at("kept")]), "kept.append((a + b).detach())\n"),
        ("self.a = x\n", lambda at: at_places.kept_detached([at("self")]), "self.a = x.detach()\n"),
        ("total += loss\n", lambda at: at_places.kept_detached([at("total")]), "total += loss.detach()\n"),
        ("kept.append((a, b))\n", lambda at: at_places.kept_detached([at("kept")]), None),
        (
            "from torch import nn\na = [x]\n",
            lambda at: at_places.made_with([at("a =")], "torch.nn.ModuleList"),
            "from torch import nn\na = nn.ModuleList([x])\n",
        ),
        (
            "import torch, torch.nn as nn\na = x\nb = y\n",
            lambda at: at_places.made_with([at("a ="), at("b =")], "torch.nn.Parameter"),
            "import torch, torch.nn as nn\na = nn.Parameter(x)\nb = nn.Parameter(y)\n",
        ),
        (
            "import torch.nn\na = x\n",
            lambda at: at_places.made_with([at("a =")], "torch.nn.Parameter"),
            "import torch.nn\na = torch.nn.Parameter(x)\n",
        ),
        (
            "from torch.nn import Parameter as P\na = x\n",
            lambda at: at_places.made_with([at("a =")], "torch.nn.Parameter"),
            "from torch.nn import Parameter as P\na = P(x)\n",
        ),
        ("a = x\n", lambda at: at_places.made_with([at("a =")], "torch.nn.Parameter"), None),
        ("import torch\na = x\n", lambda at: at_places.made_with([at("a =")], "torch.nn.ModuleList", (ast.List,)), None),
    ],
)
def test_of_single_statements(text: str, patch: Patch, expected: str | None, tmp_path: Path) -> None:
    assert result(tmp_path, text, patch) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("f(a, assign=True)", "f(a)"),
        ("f(assign=True)", "f()"),
        ("f(assign=True, strict=False)", "f(strict=False)"),
        ("f(a, assign=True, strict=False)", "f(a, strict=False)"),
        ("f((a), assign=True)", None),
        ("f(a)", None),
    ],
)
def test_without_a_keyword(call: str, expected: str | None, tmp_path: Path) -> None:
    def patch(at: Callable[[str], ResolvedSite]) -> str | None:
        place = at("f(")
        assert place.source is not None and place.call is not None
        return at_places.without_keyword(place.source, place.call, "assign")

    assert result(tmp_path, call + "\n", patch) == (None if expected is None else expected + "\n")
