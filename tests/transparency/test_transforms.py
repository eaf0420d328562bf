"""torch.func, functional_call, parametrizations, TorchScript, fx and export under the guard."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from gradguard.analysis.graph.node_values import health, plain
from gradguard.probes.diversions import Surrounding
from gradguard.probes.listeners import local
from gradguard.probes.torch_functions import uninstall
from tests.transparency.helpers import assert_transparent, grads, guarding


def func_grad() -> Any:
    x = torch.randn(3)
    f = lambda v: (v.sin() * v).sum()
    return grad(f)(x), grad(grad(lambda v: v**3))(x[0]), torch.func.grad_and_value(f)(x)


def func_vjp_jvp() -> Any:
    x = torch.randn(3)
    out, pull = vjp(torch.sin, x)
    return out, pull(torch.ones(3)), jvp(torch.exp, (x,), (torch.ones(3),))


def func_jacobians() -> Any:
    x = torch.randn(3)
    return jacrev(torch.tanh)(x), jacfwd(torch.tanh)(x), hessian(lambda v: (v**3).sum())(x)


def func_vmap() -> Any:
    xs = torch.randn(4, 3)
    per_sample = vmap(grad(lambda v: (v.exp() * v).sum()))(xs)
    randomness = vmap(lambda v: v + torch.randn(3), randomness="different")(xs)
    return per_sample, randomness, vmap(torch.dot)(xs, xs), vmap(jacrev(torch.sin))(xs)


def per_sample_gradients() -> Any:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, params, (x,)).pow(2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(params, torch.randn(5, 3))


def functional_call_trains() -> Any:
    net = nn.Linear(3, 2)
    fast = {name: p * 2 for name, p in net.named_parameters()}
    functional_call(net, fast, (torch.randn(4, 3),)).sum().backward()
    return grads(*net.parameters())


def ensembles() -> Any:
    nets = [nn.Linear(3, 2) for _ in range(3)]
    params, buffers = stack_module_state(nets)
    base = nets[0]
    return vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(params, buffers, torch.randn(4, 3))


def parametrizations() -> Any:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    for _ in range(2):
        (layer(torch.randn(2, 3)).sum() + spectral(torch.randn(2, 3)).sum() + orthogonal(torch.randn(2, 3)).sum()).backward()
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    return [p.grad for m in (spectral, orthogonal) for p in m.parameters()], layer.weight


def pruning() -> Any:
    layer = nn.Linear(4, 4)
    nn.utils.prune.l1_unstructured(layer, "weight", amount=0.5)
    layer(torch.randn(2, 4)).sum().backward()
    return layer.weight, layer.weight_orig.grad


@pytest.mark.parametrize(
    "program",
    [
        func_grad,
        func_vjp_jvp,
        func_jacobians,
        func_vmap,
        per_sample_gradients,
        functional_call_trains,
        ensembles,
        parametrizations,
        pruning,
    ],
)
def test_func_transforms(program: Any) -> None:
    assert_transparent(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace() -> None:
    def program() -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        x = torch.randn(2, 3)
        traced = torch.jit.trace(net, x)
        traced(x).sum().backward()
        return traced(x), grads(*net.parameters()), traced.code, str(traced.inlined_graph).count("aten::")

    assert_transparent(program)


def _files_of_a_trace(trace: Any) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.jit.save(trace(lambda x: torch.relu(x + 1).sum(), torch.ones(2, 3)), saved)
    archive = zipfile.ZipFile(saved)
    return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_saved_trace_has_the_same_bytes(level: str) -> None:
    """The tracer keeps the stack of every call, so a frame more or another line would be seen."""
    uninstall()
    bare, guarded = [_in(guard, lambda: _files_of_a_trace(torch.jit.trace)) for guard in (nullcontext(), guarding(level))]
    assert bare == guarded
    assert any(b"_trace.py" in content for content in bare.values())


def _in(guard: Any, program: Any) -> Any:
    with guard:
        return program()


def test_a_function_set_aside_is_the_same_to_its_callers() -> None:
    """Its lines, its warnings, its exceptions; and no guard is open inside."""
    seen = []
    for guard in (nullcontext(), guarding("standard")):
        uninstall()
        with guard:
            with pytest.raises(RuntimeError, match="inside") as failed, pytest.warns(FutureWarning) as warned:
                torch.jit.trace(_fails, torch.ones(2), optimize=True)
            session = local.listener
            assert (session is None) == isinstance(guard, nullcontext)
            traceback = [(each.path, each.lineno) for each in failed.traceback if "_trace.py" in str(each.path)]
            seen.append((traceback, [(each.filename, each.lineno) for each in warned if each.category is FutureWarning]))
    assert seen[0] == seen[1]
    (traceback, warned_at) = seen[0]
    # once torch._dynamo is loaded, torch itself puts the warning down to a function of Dynamo's that stands around this one
    around = [__file__] if "torch._dynamo.eval_frame" not in sys.modules else [__file__, sys.modules["torch._dynamo.eval_frame"].__file__]
    assert traceback and warned_at[0][0] in around


def _fails(x: torch.Tensor) -> torch.Tensor:
    assert local.listener is None
    raise RuntimeError("inside")


def test_what_cannot_be_surrounded_is_left_alone(tmp_path: Path) -> None:
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append(True)
        yield

    made: dict[str, Any] = {}
    exec(compile("def f(x): return x + 1", str(tmp_path / "gone.py"), "exec"), made)
    wrong = FunctionType((lambda x, y: x).__code__.replace(co_filename=__file__, co_firstlineno=1), made)
    for function in (made["f"], wrong):
        code = function.__code__
        with pytest.raises((OSError, ValueError, SyntaxError)):
            Surrounding(function, around)
        assert function.__code__ is code
    surrounding = Surrounding(_plain, around)
    surrounding.begin()
    assert _plain(1) == (1, 2) and entered
    surrounding.end()
    assert _plain(1, other=3) == (1, 3) and len(entered) == 1


def _plain(x: int, *, other: int = 2) -> tuple[int, int]:
    """Something."""
    return x, other


@torch.jit.script
def _scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n):
        x = x.sin() + 1
    return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script() -> None:
    def program() -> Any:
        x = torch.randn(3, requires_grad=True)
        _scripted(x, 3).sum().backward()
        module = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()))
        module(torch.randn(2, 3)).sum().backward()
        return grads(x, *module.parameters())

    assert_transparent(program)


def test_fx_tracing() -> None:
    def program() -> Any:
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.ReLU())
        traced = torch.fx.symbolic_trace(net)
        traced(torch.randn(2, 3)).sum().backward()
        return traced.code, grads(*net.parameters())

    assert_transparent(program)


def test_make_fx_sees_the_same_graph() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def program() -> Any:
        return make_fx(grad(lambda v: (v.sin() * v).sum()))(torch.randn(3)).code

    assert_transparent(program)


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def program() -> Any:
        with FakeTensorMode():
            net = nn.Linear(3, 2)
            out = net(torch.randn(5, 3))
            out.sum().backward()
            return tuple(out.shape), type(net.weight.grad).__name__

    assert_transparent(program)


def test_values_of_a_fake_tensor_are_not_asked_for() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode().from_tensor(torch.ones(3))
    assert plain(fake) is None and health(fake).finite


@pytest.mark.slow
def test_export(level: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    bare = torch.export.export(net, (torch.randn(2, 3),))
    with guarding(level):
        guarded = torch.export.export(net, (torch.randn(2, 3),))
    assert guarded.graph_module.code == bare.graph_module.code
