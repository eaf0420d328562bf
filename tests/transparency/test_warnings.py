"""Warnings name the line they name without the guard, and obey the user's filters for that line."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradguard import gradguard
from gradguard.core.errors import GradGuardWarning
from tests.transparency.helpers import assert_transparent, guarding


def scalar_conversion() -> Any:
    """C++, at the user's line."""
    x = torch.ones(1, requires_grad=True)
    return float(x), torch.tensor([x, x])


def size_mismatch() -> Any:
    """Python, `stacklevel=2`."""
    return F.mse_loss(torch.ones(3, 1), torch.ones(3))


def implicit_dim() -> Any:
    """Python, `stacklevel=3` and, through a module, 5."""
    return F.softmax(torch.ones(2, 2)), nn.Softmax()(torch.ones(2, 2))


def grad_of_a_non_leaf() -> Any:
    x = torch.ones(2, requires_grad=True) * 2
    return x.grad


def deprecated_function() -> Any:
    return torch.ones(3, 2, 2).T.shape, torch.nn.functional.tanh(torch.ones(2))


def create_graph() -> Any:
    x = torch.ones(2, requires_grad=True)
    x.pow(2).sum().backward(create_graph=True)
    x.grad = None
    return True


def scheduler_order() -> Any:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    return scheduler.get_last_lr()


def inside_a_library_function() -> Any:
    """C++ called by torch's own Python: the warning names torch's file, with the guard as without."""
    return torch.nested.nested_tensor([torch.ones(2)]).is_nested


def the_users_own_warning() -> Any:
    def helper() -> None:
        warnings.warn("mine", UserWarning, stacklevel=2)

    helper()
    torch.ones(2, requires_grad=True).register_hook(lambda g: warnings.warn("in a hook", stacklevel=1) or g)
    return True


class Warns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("forward", stacklevel=1)
        warnings.warn("forward's caller", stacklevel=2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        warnings.warn("backward", stacklevel=1)
        return grad


def in_a_function() -> Any:
    x = torch.ones(2, requires_grad=True)
    Warns.apply(x).sum().backward()
    return True


@pytest.mark.parametrize(
    "program",
    [
        scalar_conversion,
        size_mismatch,
        implicit_dim,
        grad_of_a_non_leaf,
        deprecated_function,
        create_graph,
        scheduler_order,
        inside_a_library_function,
        the_users_own_warning,
        in_a_function,
    ],
)
def test_warnings_name_the_same_line(program: Any) -> None:
    assert_transparent(program)


def test_most_of_these_programs_warn() -> None:
    for program in (scalar_conversion, size_mismatch, implicit_dim, grad_of_a_non_leaf, create_graph, scheduler_order, in_a_function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program()
        assert caught, program.__name__


def test_error_filters_raise_the_warning_where_it_was(level: str) -> None:
    x = torch.ones(1, requires_grad=True)
    with guarding(level):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="requires_grad=True to a scalar"):
                float(x)
            with pytest.raises(UserWarning, match="target size"):
                F.mse_loss(torch.ones(3, 1), torch.ones(3))


@pytest.mark.parametrize("action", ["ignore", "error", "always", "default", "module", "once"])
@pytest.mark.parametrize("mine", [True, False], ids=["this module", "another module"])
def test_filters_by_module(action: Any, mine: bool) -> None:
    def program() -> Any:
        pattern = __name__.replace(".", r"\.") if mine else "some_other_module"
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings(action, module=pattern)
            found = []
            for _ in range(2):
                try:
                    found.append(float(torch.ones(1, requires_grad=True)))
                    found.append(float(torch.zeros(1, requires_grad=True)))
                    F.mse_loss(torch.ones(3, 1), torch.ones(3))
                except UserWarning as error:
                    found.append(str(error)[:40])
        return found, [(str(w.message)[:40], w.filename, w.lineno) for w in caught]

    assert_transparent(program)


@pytest.mark.parametrize("action", ["ignore", "error", "always", "default", "module", "once"])
def test_simple_filters_set_before_and_inside(action: Any, level: str) -> None:
    def attempt() -> Any:
        globals().pop("__warningregistry__", None)
        found: list[Any] = []
        for _ in range(2):
            try:
                found.append(float(torch.ones(1, requires_grad=True)))
                found.append(float(torch.zeros(1, requires_grad=True)))
            except UserWarning as error:
                found.append(str(error)[:40])
        return found

    seen = []
    for where in ("bare", "before", "inside"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.onceregistry.clear()  # type: ignore[attr-defined]
            if where == "inside":
                with guarding(level):
                    warnings.simplefilter(action)
                    found = attempt()
            else:
                warnings.simplefilter(action)
                if where == "bare":
                    found = attempt()
                else:
                    with guarding(level):
                        found = attempt()
        seen.append((found, [w.lineno for w in caught]))
    assert seen[0] == seen[1] == seen[2]


def test_pytest_warns_and_recwarn(level: str) -> None:
    with guarding(level):
        with pytest.warns(UserWarning, match="to a scalar") as record:
            float(torch.ones(1, requires_grad=True))
    assert record[0].filename == __file__
    with pytest.warns(UserWarning, match="to a scalar") as record:
        with guarding(level):
            float(torch.ones(1, requires_grad=True))
    assert record[0].filename == __file__


def test_a_replaced_showwarning_hears_the_users_line(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, category, filename, lineno, *rest: heard.append(filename))
    with guarding(level):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", lambda message, category, filename, lineno, *rest: heard.append(filename))
            float(torch.ones(1, requires_grad=True))
    assert heard == [__file__]


_SCRIPT = """
import torch
torch.set_warn_always(True)
{guard}
    for _ in range(3):
        float(torch.ones(1, requires_grad=True))
    torch.tensor([torch.ones(1, requires_grad=True)])
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["default", "error", "ignore", "once", "ignore::UserWarning:__main__", "error::UserWarning:__main__"])
def test_command_line_filters(flag: str, tmp_path: Path) -> None:
    said = []
    for guard in ("if True:", "from gradguard import gradguard\nwith gradguard(level='strict'):"):
        script = tmp_path / "train.py"
        # the same line numbers in both
        script.write_text(_SCRIPT.format(guard=guard if "\n" in guard else "\n" + guard))
        run = subprocess.run([sys.executable, "-W", flag, str(script)], capture_output=True, text=True, timeout=120)
        shown = [line for line in run.stderr.splitlines() if "train.py" in line or "UserWarning" in line]
        said.append((run.stdout, [line for line in shown if not line.startswith('  File "<frozen')]))
    assert said[0] == said[1]


def test_the_guards_own_warning_names_the_culprit_however_deep_the_stack() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train(depth: int) -> None:
        if depth:
            return train(depth - 1)
        for _ in range(5):
            net(torch.ones(4, 3)).pow(2).mean().backward()
            optimizer.step()  # the culprit
        return None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gradguard(level="standard"):
            train(40)
    said = [each for each in caught if isinstance(each.message, GradGuardWarning)]
    lines, first = inspect.getsourcelines(train)
    assert [(each.filename, each.lineno) for each in said] == [
        (__file__, first + next(i for i, line in enumerate(lines) if "culprit" in line))
    ]
