"""No code of the user's runs because of a guard: whatever a diagnosis looks at, objects are read and nothing of theirs is called."""

from __future__ import annotations

import ast
import copy
import sys
import types
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn

import gradguard as package
from gradguard import GradGuardError, GradGuardWarning
from gradguard.core.safe_read import variables_of
from gradguard.runtime.session import current_session
from tests.transparency.helpers import LEVELS, guarding

RAN: list[str] = []
_SPECIAL = ("eq", "ne", "lt", "hash", "bool", "len", "iter", "contains", "getitem", "repr", "str", "call", "next", "float", "int", "index")


def recording(name: str, kind: type = object, special: tuple[str, ...] = _SPECIAL) -> Any:
    """A class all of whose special methods say that they ran, and then do what the base does."""

    def method(which: str) -> Any:
        def run(self: Any, *args: Any) -> Any:
            RAN.append(f"{name}.{which}")
            inherited = getattr(super(made, self), which, None)
            return inherited(*args) if inherited is not None else {"__bool__": True, "__len__": 0, "__iter__": iter(())}.get(which)

        return run

    made: Any = type(kind)(name, (kind,), {f"__{each}__": method(f"__{each}__") for each in special})
    return made


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        RAN.append(f"Meta.{name}")
        return super().__getattribute__(name)

    def __instancecheck__(cls, instance: Any) -> bool:
        RAN.append("Meta.__instancecheck__")
        return False

    def __eq__(cls, other: object) -> bool:
        RAN.append("Meta.__eq__")
        return cls is other

    def __hash__(cls) -> int:
        RAN.append("Meta.__hash__")
        return 1


class OfMeta(metaclass=Meta):
    pass


class Everything:
    """Answers to every name, and says so."""

    def __getattr__(self, name: str) -> Any:
        RAN.append(f"Everything.{name}")
        raise AttributeError(name)

    @property
    def weight(self) -> Any:
        RAN.append("Everything.weight")
        return torch.ones(1)

    grad = state = param_groups = step = training = weight


class Slotted:
    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        RAN.append(f"Slotted.{name}")
        raise AttributeError(name)


class Asked:
    def __getattribute__(self, name: str) -> Any:
        RAN.append(f"Asked.{name}")
        return super().__getattribute__(name)


class Disguised:
    @property
    def __class__(self) -> Any:
        RAN.append("Disguised.__class__")
        return nn.Module

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class OwnDict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        RAN.append("OwnDict.__dict__")
        return {}


class Descriptor:
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        RAN.append("Descriptor.__get__")
        return torch.ones(2, requires_grad=True)


class Described:
    bank = Descriptor()


def things() -> list[Any]:
    """One object of every kind that runs something when it is looked at the usual way."""
    containers = ("iter", "len", "getitem", "contains", "eq", "bool", "repr")
    listing, mapping = recording("List", list, containers)([Everything(), torch.ones(2)]), recording("Dict", dict, containers)(a=Slotted())
    named, ordered = recording("Tuple", tuple, containers)((1, Asked())), recording("Ordered", OrderedDict, containers)(a=Asked())
    queue, key = recording("Deque", deque, containers)([Disguised()]), recording("Text", str, ("eq", "repr", "str"))
    key.__hash__ = str.__hash__
    lazy = types.ModuleType("lazy")
    lazy.__dict__["__getattr__"] = lambda name: RAN.append(f"lazy.{name}")
    plain = recording("Special")()
    mocks = [Mock(spec=nn.Module), MagicMock(spec=dict), Mock(spec=torch.optim.Optimizer), Mock(spec=torch.Tensor), Mock()]
    found = [OfMeta(), OfMeta, Everything(), Slotted(), Asked(), Disguised(), OwnDict(), Described(), Described, listing, mapping, named]
    found += [ordered, queue, {key("k"): Everything()}, plain, lazy, *mocks, [Asked()], (Disguised(), Everything()), {"x": Slotted()}]
    return [*found, types.SimpleNamespace(a=Asked())]


WATCHED = things()
a1, b1, c1, d1, e1, f1, g1, h1, *rest1 = WATCHED


class Net(nn.Module):
    """A module whose own methods of listing are overridden, with such objects among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.extras, self.one, self.two = list(WATCHED), Everything(), Asked()

    def __getattr__(self, name: str) -> Any:
        RAN.append(f"Net.{name}")
        return super().__getattr__(name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        RAN.append("Net.named_parameters")
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        RAN.append("Net.named_modules")
        return super().named_modules(*args, **kwargs)

    def modules(self) -> Iterator[Any]:
        RAN.append("Net.modules")
        return super().modules()

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        RAN.append("Net.parameters")
        return super().parameters(recurse)

    @property
    def frozen_part(self) -> Any:
        RAN.append("Net.frozen_part")
        return self.body

    def freeze(self) -> None:
        for parameter in self.frozen_part.parameters():
            parameter.requires_grad = False

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.freeze()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


class Failed(RuntimeError):
    def __str__(self) -> str:
        RAN.append("Failed.__str__")
        return "element 0 of tensors does not require grad"


def backward_twice(net: Net, x: torch.Tensor) -> None:
    loss = net(x).sum()
    loss.backward()
    loss.backward()


def written_in_place(net: Net, x: torch.Tensor) -> None:
    hidden = torch.tanh(net.body(x))
    hidden += 1
    net.head(hidden).sum().backward()


def no_path(net: Net, x: torch.Tensor) -> None:
    value = Net.forward(net, x).detach()
    value.sum().backward()


def no_path_under_no_grad(net: Net, x: torch.Tensor) -> None:
    with torch.no_grad():
        value = net(x)
    value.mean().backward()


def not_a_scalar(net: Net, x: torch.Tensor) -> None:
    net(x).backward()


def a_leaf_written(net: Net, x: torch.Tensor) -> None:
    weight = net.body.weight
    weight += 1


def shapes(net: Net, x: torch.Tensor) -> None:
    (net.body(x) @ torch.ones(5, 5)).sum().backward()


def dtypes(net: Net, x: torch.Tensor) -> None:
    net(x.double()).sum().backward()


def carried(net: Net, x: torch.Tensor) -> None:
    state = torch.zeros(2, 3)
    for _ in range(2):
        state = torch.tanh(net.body(x + state))
        state.sum().backward()


def nothing_finite(net: Net, x: torch.Tensor) -> None:
    (net(x) * float("nan")).sum().backward()


def an_error_of_their_own(net: Net, x: torch.Tensor) -> None:
    raise Failed(Everything())


def a_division_by_zero(net: Net, x: torch.Tensor) -> None:
    value = torch.sqrt((net(x) * 0).sum())
    value.backward()


def made_in_inference_mode(net: Net, x: torch.Tensor) -> None:
    with torch.inference_mode():
        features = net.body(x)
    net.head(features).sum().backward()


def written_through_out(net: Net, x: torch.Tensor) -> None:
    torch.add(net.head.weight, 1, out=net.head.weight)


def a_view_of_several(net: Net, x: torch.Tensor) -> None:
    first, second = net.body(x).unbind(0)
    first += 1
    second.sum().backward()


def a_copy_with_a_graph(net: Net, x: torch.Tensor) -> None:
    record = {"held": net(x), "things": list(WATCHED[10:12])}
    copy.deepcopy(record["held"])


RAISING = [
    made_in_inference_mode, written_through_out, a_view_of_several, a_copy_with_a_graph,
    backward_twice, written_in_place, no_path, no_path_under_no_grad, not_a_scalar, a_leaf_written, shapes, dtypes, carried,
    nothing_finite, an_error_of_their_own, a_division_by_zero,
]  # fmt: skip


def training(zero: bool, eval_mode: bool, all_of_it: bool, scaler: bool) -> None:
    locals1, locals2, net = things(), Everything(), Net()
    trained = list(nn.Module.parameters(net if all_of_it else net.head))
    optimizer, extra = torch.optim.SGD(trained, 0.01), torch.amp.GradScaler("cpu", enabled=scaler)
    optimizer.extras = locals1  # type: ignore[attr-defined]
    if eval_mode:
        net.eval()
    for _ in range(26):
        if zero:
            optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).pow(2).mean()
        extra.scale(loss).backward()
        extra.step(optimizer)
        extra.update()
    assert locals2 is not None


SILENT = [(False, False, True, False), (True, True, True, True), (True, False, False, False), (True, False, True, False)]


def ran(program: Callable[[], Any], level: str | None) -> Counter[str]:
    """What of the user's ran."""
    RAN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if level is None:
            program()
        else:
            with guarding(level) as guard:
                program()
            assert guard.diagnoses is not None
    session = current_session()
    assert not session.faulty
    return Counter(RAN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", RAISING, ids=lambda each: each.__name__)
def test_nothing_runs_when_an_error_is_diagnosed(fails: Callable[[Net, torch.Tensor], None]) -> None:
    def program() -> None:
        local, (first, *more), net = things(), things(), Net()
        for _ in range(2):
            try:
                fails(net, torch.ones(2, 3))
            except RuntimeError as error:
                caught.append(error)
        assert local is not first and more is not None

    caught: list[RuntimeError] = []
    bare = ran(program, None)
    for level in LEVELS:
        assert ran(program, level) == bare, level
    if fails not in (a_copy_with_a_graph, an_error_of_their_own, nothing_finite, shapes, a_division_by_zero):
        assert sum(isinstance(error, GradGuardError) for error in caught) >= len(LEVELS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", SILENT, ids=["stale", "eval-scaler", "part", "sound"])
def test_nothing_runs_when_silent_bugs_are_looked_for(how: tuple[bool, bool, bool, bool]) -> None:
    bare = ran(lambda: training(*how), None)
    for level in ("standard", "forensic"):
        assert ran(lambda: training(*how), level) == bare, level


def test_the_dictionary_of_locals_stays_the_programs(level: str) -> None:
    def fit(rate: float = 0.1, wanted: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
        settings = locals()
        before = dict(settings)
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * weight).sum()
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()
        return before, dict(settings)

    with guarding(level):
        before, after = fit()
    assert before == after == {"rate": 0.1, "wanted": 2}


def test_the_variables_of_a_frame_are_read_and_not_kept() -> None:
    def outer() -> tuple[dict[str, Any], Any]:
        held, inner = torch.ones(1), 1

        def closes() -> Any:
            return inner

        found = variables_of(sys._getframe())
        assert found["held"] is held and found["inner"] == 1 and found["closes"] is closes
        return {name: type(value).__name__ for name, value in found.items()}, weakref.ref(held)

    for _ in range(100):
        names, ref = outer()
        assert ref() is None
        assert set(names) == {"held", "inner", "closes"}


def test_mocks_of_torchs_classes_are_no_trouble(level: str) -> None:
    for thing in (
        Mock(spec=nn.Module),
        MagicMock(spec=nn.Module),
        Mock(spec=dict),
        Mock(spec=torch.Tensor),
        Mock(spec=torch.optim.Optimizer),
    ):
        with pytest.raises(GradGuardError) as caught, guarding(level):
            hidden = torch.tanh(nn.Linear(3, 3)(torch.ones(2, 3)))
            hidden += 1
            hidden.sum().backward()
        assert caught.value.diagnosis.code == "GG101" and thing is not None


@pytest.mark.filterwarnings("ignore::gradguard.GradGuardWarning")
def test_a_property_of_the_users_is_no_variable() -> None:
    reads: list[int] = []

    class Memory:
        def __init__(self) -> None:
            self._held = torch.zeros(5, 8)

        @property
        def state(self) -> torch.Tensor:
            reads.append(1)
            return self._held

        @state.setter
        def state(self, value: torch.Tensor) -> None:
            self._held = value

    memory, cell = Memory(), nn.RNNCell(4, 8)
    with pytest.raises(GradGuardError) as caught, guarding("standard"):
        for step in range(3):
            memory.state = cell(torch.randn(5, 4), memory.state)
            memory.state.pow(2).mean().backward()
            assert len(reads) == 2 * (step + 1)
    assert len(reads) == 4
    assert caught.value.diagnosis.culprit is not None
    assert GradGuardWarning is not None


def test_the_text_of_programs_is_never_evaluated() -> None:
    """`eval`, `exec` and `compile` are for running the user's script as such: beside, two modules compile text of their own."""
    root = Path(package.__file__).parent
    found = set()
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile"):
                found.add((file.relative_to(root).as_posix(), "PyCF_ONLY_AST" in ast.unparse(node)))
    own_code = {"probes/diversions.py", "torch_compat/private_api.py"}
    assert {file for file, parsed_only in found if not parsed_only} == {"cli/script.py", *own_code}


def test_rules_list_what_modules_hold_by_reading() -> None:
    """A module's own `parameters()` and the like may be the user's: rules have `gradguard.core.safe_read` for them."""
    root = Path(package.__file__).parent
    listing = {"named_parameters", "named_modules", "named_children", "named_buffers", "buffers", "children", "state_dict"}
    found = []
    for file in [
        *(root / "rules").rglob("*.py"),
        *(root / "analysis").rglob("*.py"),
        *(root / "monitors").glob("*.py"),
        *(root / "probes").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in listing:
                found.append(f"{file.name}:{node.lineno}")
            if isinstance(node, ast.Attribute) and node.attr == "f_locals":
                found.append(f"{file.name}:{node.lineno}")
    assert found == []
