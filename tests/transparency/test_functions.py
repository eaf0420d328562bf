"""Custom autograd Functions of every style, tensor subclasses, and what they may rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.transparency.helpers import assert_transparent, grads, guarding


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Separate(Function):
    """The style with `setup_context`, usable under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.sin() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.factor = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.cos() * ctx.factor * grad, None


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return grad * 2


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class Several(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, flag: bool) -> Any:
        ctx.set_materialize_grads(False)
        indices = a.argsort()
        ctx.mark_non_differentiable(indices)
        ctx.flag = flag
        return a * 2, b * 3, indices

    @staticmethod
    def backward(ctx: Any, ga: Any, gb: Any, _: Any) -> Any:
        assert gb is None
        return ga * 2, None, None


class Inner(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = leaf.exp()
        ctx.leaf, ctx.out = leaf, out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.out.backward(grad)  # a backward inside the backward
        return ctx.leaf.grad


class WithJvp(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_forward(x)
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.exp() * tangent

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.exp() * grad


def test_functions_of_every_style() -> None:
    def program() -> Any:
        x = torch.randn(4, requires_grad=True)
        (Cube.apply(x) + Separate.apply(x, 2.0) + Once.apply(x) + Inner.apply(x)).sum().backward()
        y = x * 1
        InPlace.apply(y)
        y.sum().backward()
        a, b, indices = Several.apply(x, x * 2, True)
        a.sum().backward()
        return grads(x), indices, b, type(a.grad_fn).__name__, a.grad_fn.name()

    assert_transparent(program)


def test_double_backward_through_functions() -> None:
    def program() -> Any:
        x = torch.randn(4, requires_grad=True)
        (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first, second

    assert_transparent(program)


def test_once_differentiable_still_refuses_a_second_time() -> None:
    def program() -> None:
        x = torch.randn(4, requires_grad=True)
        (first,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
        first.sum().backward()

    assert_transparent(program, fails=True)


def test_functions_under_func_transforms() -> None:
    def program() -> Any:
        import torch.autograd.forward_ad as fwAD

        x = torch.randn(3)
        with fwAD.dual_level():
            tangent = fwAD.unpack_dual(WithJvp.apply(fwAD.make_dual(x, torch.ones(3)))).tangent
        return torch.func.grad(lambda v: Separate.apply(v, 2.0).sum())(x), torch.vmap(lambda v: Separate.apply(v, 2.0))(x), tangent

    assert_transparent(program)


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own."""


class Logged(torch.Tensor):
    """A subclass with its own `__torch_function__`."""

    log: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.log.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


class Keep(Function):
    """Relies on the identity, type and attributes of what it saved."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        Keep.seen.append((weight, type(weight), getattr(weight, "main_grad", None), type(x), getattr(x, "note", None)))
        if hasattr(weight, "main_grad"):
            weight.main_grad += grad.t() @ x
        return grad @ weight, grad.t() @ x


def test_a_saved_parameter_keeps_identity_type_and_attributes(level: str) -> None:
    Keep.seen.clear()
    weight = nn.Parameter(torch.randn(2, 3))
    weight.main_grad = torch.zeros(2, 3)  # type: ignore[attr-defined]
    x = torch.randn(4, 3).as_subclass(Tagged).requires_grad_()
    x.note = "mine"  # type: ignore[attr-defined]
    with guarding(level):
        Keep.apply(x, weight).sum().backward()
    ((saved, kind, main, x_kind, note),) = Keep.seen
    assert saved is weight
    assert kind is nn.Parameter
    assert main is weight.main_grad  # type: ignore[attr-defined]
    assert (x_kind, note) == (Tagged, "mine")
    assert weight.main_grad.abs().sum() > 0  # type: ignore[attr-defined]


def test_tensor_subclasses() -> None:
    def program() -> Any:
        Logged.log.clear()
        x = torch.randn(3).as_subclass(Logged).requires_grad_()
        y = (x * 2).relu() + torch.ones(3)
        y.sum().backward()
        plain = torch.randn(3).as_subclass(Tagged)
        out = plain + 1
        return type(y), type(out), Logged.log.copy(), x.grad.as_subclass(torch.Tensor), y.detach().as_subclass(torch.Tensor)

    assert_transparent(program)


class Wrapper(torch.Tensor):
    """A wrapper subclass with `__torch_dispatch__`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map

        unwrap = lambda t: t.inner if isinstance(t, Wrapper) else t
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda t: Wrapper(t) if isinstance(t, torch.Tensor) else t, out)


def test_wrapper_subclasses() -> None:
    def program() -> Any:
        x = Wrapper(torch.randn(3)).requires_grad_()
        y = (x * 2).sin().sum()
        y.backward()
        z = Wrapper(torch.randn(3))
        z.add_(1)
        return y.inner, x.grad.inner, type(y), z.inner

    assert_transparent(program)


def test_duck_typed_arguments() -> None:
    """An object that is no tensor but has `__torch_function__`."""

    class Duck:
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> str:
            return func.__name__

    def program() -> Any:
        return torch.add(Duck(), 1), torch.nn.functional.relu(Duck()), torch.mean(Duck())

    assert_transparent(program)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_function_is_the_users_own_object(where: str, level: str) -> None:
    class Mine(Exception):
        pass

    raised = Mine("whoops")

    class Bad(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise raised
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise raised

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(Mine) as caught:
        with guarding(level):
            Bad.apply(x).sum().backward()
    assert caught.value is raised
