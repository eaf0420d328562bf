"""Objects are read, expressions are interpreted, and what only running something could tell stays unknown."""

from __future__ import annotations

import ast
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from torch import nn

from gradguard.analysis.live.interpreter import Interpreter, UnknownError
from gradguard.core.safe_read import UNKNOWN, attributes, elements, follow, message_of, named_modules, named_parameters, pairs, peek

RAN: list[str] = []


@dataclass
class Record:
    inner: Any = None


@dataclass(slots=True)
class Slim:
    inner: Any = None


class Base:
    shared = 3

    def method(self) -> int:
        RAN.append("method")
        return 1


class Rich(Base):
    def __init__(self) -> None:
        self.own, self._hidden, self.shadowed = 1, [2], 9

    @property
    def hidden(self) -> Any:
        return self._hidden

    @property
    def deeper(self) -> Any:
        return self.hidden

    @property
    def constant(self) -> bool:
        return False

    @property
    def computed(self) -> int:
        RAN.append("computed")
        return self.own + 1

    @property
    def endless(self) -> Any:
        return self.endless_too

    @property
    def endless_too(self) -> Any:
        return self.endless

    @cached_property
    def later(self) -> int:
        RAN.append("later")
        return 1


Pair = namedtuple("Pair", "left right")


def test_attributes_are_read_where_they_are_stored() -> None:
    RAN.clear()
    rich = Rich()
    assert [peek(rich, name) for name in ("own", "shared", "hidden", "deeper", "constant")] == [1, 3, [2], [2], False]
    assert [peek(rich, name) for name in ("computed", "endless", "later", "absent")] == [UNKNOWN] * 4
    assert peek(rich, "method").__func__ is Base.method
    rich.__dict__["later"] = 5
    assert peek(rich, "later") == 5
    assert peek(Slim(4), "inner") == 4 and follow(Record(Slim(Pair(1, 2))), "inner.inner.right") == 2
    module = nn.Sequential(OrderedDict(first=nn.Linear(2, 2)))
    assert follow(module, "first.weight") is module.first.weight and attributes(rich)["own"] == 1
    assert peek(torch.ones(1), "grad_fn") is UNKNOWN
    assert not RAN


def test_containers_are_read_whatever_their_class_makes_of_them() -> None:
    class Loud(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            RAN.append("items")
            return super().items()

        values = __iter__ = __len__ = items  # type: ignore[assignment]

    RAN.clear()
    assert pairs(Loud(a=1)) == [("a", 1)] and elements(Loud(a=1)) == [1] and elements(range(3)) == []
    assert not RAN


def test_modules_are_listed_as_torch_lists_them() -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.Sequential(shared, nn.GRU(2, 2))}))
    assert list(named_modules(module)) == list(module.named_modules())
    for options in ({}, {"recurse": False}, {"remove_duplicate": False}):
        ours, torchs = list(named_parameters(module, **options)), list(module.named_parameters(**options))
        if "remove_duplicate" not in options:  # for which torch walks through a module that is held twice twice
            assert [name for name, _ in ours] == [name for name, _ in torchs]
            assert all(a is b for (_, a), (_, b) in zip(ours, torchs, strict=True))


def test_an_error_says_what_it_says_without_the_users_code() -> None:
    class Speaking(RuntimeError):
        def __str__(self) -> str:
            RAN.append("str")
            return "said"

    RAN.clear()
    assert message_of(RuntimeError("plain")) == "plain" and message_of(KeyError("key")) == "'key'"
    assert message_of(Speaking("x")) == "" and message_of(RuntimeError(Rich())) == ""
    assert not RAN


NAMES = {
    "names": ["layer.0.weight", "layer.1.bias"],
    "sizes": {"a": 1, "b": 2},
    "net": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    "rich": Rich(),
    "Linear": nn.Linear,
}
KNOWN = [
    "any(n.startswith('layer.1') for n in names)", "[n.split('.')[1] for n in names if 'bias' in n]", "len(names) * 2 - 1", "names[-1][:5]",
    "sorted(sizes)", "{k: v for k, v in sizes.items() if v > 1}", "not names or sizes['a'] == 1 < 2", "'x' if 'c' in sizes else 'y'",
    "f'{names[0]}!'", "(*names, 1)", "[type_ for type_ in (1, 2)]", "list(range(2, 6))[1::2]", "[i for i, n in enumerate(names) if i]",
    "names is not None and 'q' not in names", "max(sizes.values())", "rich.own + rich.shared", "'a-b'.replace('-', '_').upper()",
    "[m for m in net[:1]]", "[m for m in net[1:]]",
]  # fmt: skip
UNKNOWABLE = [
    "rich.computed", "rich.method()", "absent", "open('x')", "rich == 1", "rich.own.real", "(lambda: 1)()", "names.append(1)", "print(1)",
    "[x for x in range(20_000_000)]", "'x' * 10 ** 9", "2 ** 10 ** 9", "names.sort(key=len)", "__import__('os')", "bool(rich)", "rich[0]",
    "sum(1 for a in range(9999) for b in range(9999))", "[*rich]", "next(iter(names))",
]  # fmt: skip


@pytest.mark.parametrize("text", KNOWN)
def test_expressions_are_worth_what_python_says(text: str) -> None:
    assert Interpreter(NAMES).value(ast.parse(text, mode="eval").body) == eval(text, dict(NAMES))


@pytest.mark.parametrize("text", UNKNOWABLE)
def test_what_would_run_or_take_long_is_not_known(text: str) -> None:
    RAN.clear()
    began = time.monotonic()
    with pytest.raises(UnknownError):
        Interpreter(NAMES).value(ast.parse(text, mode="eval").body)
    assert not RAN and time.monotonic() - began < 2


def test_modules_in_expressions() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    known = Interpreter({"net": net, "Linear": nn.Linear})
    layers = known.value(ast.parse("[m for m in net if isinstance(m, Linear)]", mode="eval").body)
    assert layers == [net[0]] and known.value(ast.parse("net[0].weight", mode="eval").body) is net[0].weight
    assert list(known.value(ast.parse("[p for p in net.parameters()]", mode="eval").body)) == list(net.parameters())

    class Own(nn.Sequential):
        def parameters(self, recurse: bool = True) -> Any:
            RAN.append("parameters")
            return super().parameters(recurse)

        def __len__(self) -> int:
            RAN.append("len")
            return 1

    RAN.clear()
    for text in ("net.parameters()", "len(net)", "1 if net else 2"):
        with pytest.raises(UnknownError):
            Interpreter({"net": Own(nn.ReLU())}).value(ast.parse(text, mode="eval").body)
    assert not RAN and partial is not None
