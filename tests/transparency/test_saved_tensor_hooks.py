"""The saved-tensor probe: PyTorch refuses what it refuses without, in the same words, and everybody's hooks work."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gradguard import gradguard
from gradguard.runtime.session import current_session
from gradguard.torch_compat import saved_tensors
from gradguard.torch_compat.saved_tensors import Packed, acts
from tests.transparency.helpers import fresh_settings, observe

X = torch.randn(3, 3, requires_grad=True)
HOW = [{"level": "watch", "memory": True}, {"level": "strict", "memory": True}, {"level": "forensic"}]


def probing(how: dict[str, Any]) -> gradguard:
    guard = gradguard(settings=fresh_settings(**how))
    guard.run._memory_told = True  # no table for each of these runs when the process ends
    return guard


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not acts() and not current_session().saving.on


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[1]


def output_written() -> None:
    y = X.sigmoid()
    y.mul_(2)
    y.sum().backward()


def input_written() -> None:
    y = X * 1.0
    z = y * y
    y.add_(1)
    z.sum().backward()


def input_detached() -> None:
    y = X * 1.0
    z = y * y
    y.detach_()
    z.sum().backward()


def input_written_and_detached() -> None:
    y = X * 1.0
    z = y * y
    y.mul_(2)
    y.detach_()
    z.sum().backward()


def function_s_output_written() -> None:
    y = Exp.apply(X)
    z = y * y
    y.add_(1)
    z.sum().backward()


def function_s_own_output_written() -> None:
    y = Exp.apply(X)
    y.add_(1)
    y.sum().backward()


def part_of_a_base_written() -> None:
    y = X * 1
    z = y.pow(2)
    y[0].zero_()
    torch.autograd.grad(z.sum(), X)


def view_written_and_its_base() -> None:
    y = X * 1
    z = y[0].exp_()
    y.add_(1)
    z.sum().backward()


def view_written_twice() -> None:
    y = X * 1
    v = y[0]
    v.exp_()
    v.add_(1)
    v.sum().backward()


def view_s_node_lives() -> None:
    y = X * 1
    v = y[0]
    v.exp_()
    v[1] = 3
    y.sum().backward()


def step_between() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def leaf_s_data_became_computed() -> None:
    x = torch.ones(3)
    y = x * X[0]
    x.mul_(X[1])
    y.sum().backward()


def half_precision_scalar() -> None:
    y = X.to(torch.bfloat16).sum().exp()
    y.add_(1)
    y.backward()


def complex_numbers() -> None:
    y = torch.view_as_complex(torch.stack([X, X], -1)).exp()
    y.mul_(2)
    y.abs().sum().backward()


def second_order() -> None:
    y = (X * 1.0).exp()
    (grad,) = torch.autograd.grad(y.sum(), X, create_graph=True)
    y.add_(1)
    grad.sum().backward()


def freed() -> None:
    loss = X.exp().sum()
    loss.backward()
    loss.backward()


def through_an_open_loop_of_layers() -> None:
    states = [torch.tanh(X)]
    for _ in range(3):
        states.append(torch.tanh(states[-1] @ X))
    states[1].add_(1)
    states[-1].sum().backward()


REFUSED = [
    output_written,
    input_written,
    input_detached,
    input_written_and_detached,
    function_s_output_written,
    function_s_own_output_written,
    part_of_a_base_written,
    view_written_and_its_base,
    view_written_twice,
    view_s_node_lives,
    step_between,
    leaf_s_data_became_computed,
    half_precision_scalar,
    complex_numbers,
    second_order,
    freed,
    through_an_open_loop_of_layers,
]


def culprits(guard: gradguard) -> list[tuple[str, int | None]]:
    return [(found.code, None if found.culprit is None else found.culprit.line) for found in guard.diagnoses]


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
@pytest.mark.parametrize("anomaly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "anomaly mode"])
@pytest.mark.filterwarnings("ignore:(Anomaly Detection|Error detected)")
def test_what_pytorch_refuses_is_refused_in_the_same_words(program: Callable[[], None], anomaly: bool) -> None:
    with torch.autograd.set_detect_anomaly(anomaly):
        bare = observe(program)
        assert bare.error is not None and bare.error[0] is RuntimeError
        with_none = probing({"level": "strict"})
        observe(program, with_none)
        for how in HOW:
            guard = probing(how)
            error = observe(program, guard).error
            if how["level"] == "watch" and "view" in program.__name__:  # which operation wrote the view is known of traced steps alone
                assert error is not None and error[1].split("[")[0] == bare.error[1].split("[")[0]
                continue
            assert error == bare.error, how
            if how["level"] == "strict" and culprits(with_none):
                assert culprits(guard) == culprits(with_none)


def test_what_the_graph_hides_is_diagnosed() -> None:
    """The operation that wrote a view is inside the node that copies the view back, and shows nothing."""
    guard = probing({"level": "forensic"})
    assert observe(view_written_and_its_base, guard).error is not None
    assert culprits(guard) == [("GG101", view_written_and_its_base.__code__.co_firstlineno + 3)]


def test_the_words_are_learnt_without_the_release_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensors, "_specimen", lambda tensor: None)
    error = observe(output_written, probing(HOW[0])).error
    assert error is not None and "which is output 0 of Sigmoid" in error[1] and "is at version 1; expected version 0" in error[1]


# -- everybody's hooks ---------------------------------------------------------------------------------------------------


def block(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x @ x).relu(), 0.5)


def checkpointing() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False) + checkpoint(block, x, use_reentrant=True)
    y.sum().backward()
    return x.grad


def offloading() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    with save_on_cpu():
        y = block(x)
    block(y).sum().backward()
    return x.grad


def own_hooks() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach() * 2

    with saved_tensors_hooks(pack, lambda tensor: tensor * 3):
        y = block(x)
    block(y).sum().backward()
    return x.grad, packed


def own_hooks_of_one_value() -> Any:
    x = torch.ones(3, requires_grad=True)
    y = x.pow(2)
    seen: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(f"pack {tensor.requires_grad} {torch.is_grad_enabled()}")
        return tensor * 2

    y.grad_fn._raw_saved_self.register_hooks(pack, lambda tensor: tensor)  # type: ignore[union-attr]
    y.sum().backward()
    return x.grad, seen


def a_second_pair_of_hooks() -> None:
    y = X.pow(2)
    slot = y.grad_fn._raw_saved_self  # type: ignore[union-attr]
    slot.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    slot.register_hooks(lambda tensor: tensor, lambda tensor: tensor)


def torch_func() -> Any:
    x = torch.randn(3)
    square = lambda v: (v.sin() * v).sum()
    first = torch.func.grad(square)(x), torch.func.hessian(square)(x), torch.func.jacrev(torch.exp)(x)
    leaf = torch.randn(3, requires_grad=True)
    (leaf.exp() * torch.func.vmap(torch.func.grad(square))(torch.randn(2, 3)).sum()).sum().backward()
    return first, leaf.grad


def hooks_are_refused_there() -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"), save_on_cpu():
        X.exp()


class Attribute(nn.Parameter):
    pass


class Sees(torch.autograd.Function):
    kinds: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        Sees.kinds.append((type(weight), weight.main_grad))
        return grad * weight, grad * x


def function_gets_its_own_objects() -> Any:
    Sees.kinds.clear()
    weight = nn.Parameter(torch.ones(3))
    weight.main_grad = 7  # type: ignore[attr-defined]
    Sees.apply(torch.ones(3, requires_grad=True), weight).sum().backward()
    return [(kind.__name__, number) for kind, number in Sees.kinds]


def double_backward() -> Any:
    x = torch.randn(4, 4, requires_grad=True)
    y = block(x).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    first.pow(2).sum().backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    first.pow(2).sum().backward()
    return once, x.grad


def foreach_in_place() -> Any:
    x = torch.randn(3, requires_grad=True)
    both = [x * 1, x * 2]
    torch._foreach_exp_(both)
    (both[0] + both[1]).sum().backward()
    return x.grad


def a_dispatch_mode() -> Any:
    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 3, requires_grad=True)
    with Log():
        (x * 1).sigmoid().mm(x).sum().backward()
    return x.grad, seen


UNDISTURBED = [
    checkpointing,
    offloading,
    own_hooks,
    own_hooks_of_one_value,
    a_second_pair_of_hooks,
    torch_func,
    hooks_are_refused_there,
    function_gets_its_own_objects,
    double_backward,
    foreach_in_place,
    a_dispatch_mode,
]


@pytest.mark.parametrize("program", UNDISTURBED, ids=lambda program: program.__name__)
def test_results_are_the_same_bit_for_bit(program: Callable[[], Any]) -> None:
    observe(program)
    bare = observe(program)
    for how in HOW:
        guarded = observe(program, probing(how))
        assert (guarded.error, guarded.value, guarded.rng, guarded.said) == (bare.error, bare.value, bare.rng, bare.said), how


def test_hooks_that_stand_when_the_guard_is_entered_still_win() -> None:
    packed: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        with probing(HOW[0]):
            X.exp()
            assert len(packed) == 1
        X.exp()
    assert len(packed) == 2


def test_the_users_hooks_outlive_the_guard() -> None:
    packed: list[torch.Tensor] = []
    hooks = saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    with probing(HOW[0]):
        hooks.__enter__()
    X.exp()
    hooks.__exit__()
    assert len(packed) == 1 and isinstance(X.exp().grad_fn._saved_result, torch.Tensor)  # type: ignore[union-attr]


# -- nothing is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.exp(),
        lambda x: (x * 1).exp_(),
        lambda x: (x * 1)[0].exp_(),
        lambda x: torch.softmax(x * 1, 0),
        lambda x: torch.linalg.svd(x)[1],
        lambda x: torch.nn.LSTM(3, 3)(x)[0],
        lambda x: Exp.apply(x),
        lambda x: torch._foreach_sigmoid_([x * 1, x * 2]) or x * 1,
        lambda x: checkpoint(block, x, use_reentrant=False),
    ],
)
def test_a_dropped_graph_dies_at_once(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    alive: list[weakref.ref[Any]] = []

    class Tag:
        pass

    gc.collect()
    gc.disable()
    try:
        with probing(HOW[0]):
            saving = current_session().saving
            before = {id(fact) for fact in saving.facts()}  # anomaly mode keeps some graphs, with a guard and without
            held = saving.held
            root = X * 1
            tag = Tag()
            root.grad_fn.metadata["tag"] = tag  # type: ignore[union-attr]
            alive.append(weakref.ref(tag))
            del tag
            result = make(root)
            del root, result
            assert alive[0]() is None
            assert [fact for fact in saving.facts() if id(fact) not in before] == []
            assert saving.held <= held
    finally:
        gc.enable()


def test_other_threads_have_none() -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(X.exp().grad_fn._raw_saved_result.unpack_hook)  # type: ignore[union-attr]

    with probing(HOW[0]):
        assert type(X.exp().grad_fn._raw_saved_result.data) is Packed  # type: ignore[union-attr]
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("by_default", [True, False])
def test_a_hook_that_an_unpack_hook_registers_sees_the_same(how: dict[str, Any], by_default: bool) -> None:
    """A node keeps the gradients that it gets only where it has hooks before it runs."""

    def program() -> list[Any]:
        seen: list[Any] = []
        x = torch.ones(3, requires_grad=True)

        def unpack(value: torch.Tensor) -> torch.Tensor:
            y.grad_fn.register_hook(lambda made, given: seen.append((len(made), [g.tolist() for g in given])))  # type: ignore[union-attr]
            return value

        if by_default:
            with saved_tensors_hooks(lambda value: value, unpack):
                y = x * x
        else:
            y = x * x
            y.grad_fn._raw_saved_self.register_hooks(lambda value: value, unpack)  # type: ignore[union-attr]
        y.sum().backward()
        return seen

    bare = program()
    assert bare[0] == (2, [])
    with probing(how):
        assert program() == bare
