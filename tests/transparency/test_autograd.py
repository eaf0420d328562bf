"""Everything autograd offers works as without the guard: higher orders, closures, hooks, checkpoints, odd tensors, contexts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.transparency.helpers import assert_transparent, grads, guarding


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def double_backward() -> Any:
    x = torch.randn(5, requires_grad=True)
    (first,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    return first, second, third


def gradient_penalty() -> Any:
    torch.manual_seed(1)
    critic = _net()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(4):
        x = torch.randn(8, 4, requires_grad=True)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = critic(x).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
    return list(critic.parameters())


def backward_create_graph() -> Any:
    w = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (w**3).sum().backward(create_graph=True)
    assert w.grad is not None
    (second,) = torch.autograd.grad(w.grad.sum(), w)
    w.grad = None
    return second


def retain_graph() -> Any:
    x = torch.randn(4, requires_grad=True)
    loss = (x.exp() * x).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(x)


def inputs_and_allow_unused() -> Any:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    found = torch.autograd.grad((a * 2).sum(), (a, b), allow_unused=True)
    zeros = torch.autograd.grad((a * 2).sum(), (a, b), materialize_grads=True)
    (a * b).sum().backward(inputs=[a])
    batched = torch.autograd.grad(a * b, a, torch.eye(3), is_grads_batched=True)
    return found, zeros, grads(a, b), batched


def lbfgs() -> Any:
    net = _net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(4)]
    return losses, list(net.parameters())


def closure_sgd() -> Any:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(3, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)], list(net.parameters())


def step_inside_backward() -> Any:
    """Optimizers that step in hooks as gradients arrive, to save memory."""
    net = _net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(6):
        net(torch.randn(4, 4)).pow(2).mean().backward()
    return list(net.parameters())


def jacobian_and_hessian() -> Any:
    x = torch.randn(3)
    f = lambda v: (v.sin() * v.flip(0)).sum()
    return (
        torch.autograd.functional.hessian(f, x),
        torch.autograd.functional.jacobian(torch.tanh, x),
        torch.autograd.functional.vjp(f, x),
        torch.autograd.functional.jvp(torch.sin, x, torch.ones(3), create_graph=False),
        torch.autograd.functional.hvp(f, x, torch.ones(3)),
    )


def gradcheck() -> Any:
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    return torch.autograd.gradcheck(torch.sin, (x,)), torch.autograd.gradgradcheck(torch.exp, (x,))


def forward_mode() -> Any:
    import torch.autograd.forward_ad as fwAD

    with fwAD.dual_level():
        dual = fwAD.make_dual(torch.randn(3), torch.ones(3))
        return fwAD.unpack_dual(dual.sin() * dual).tangent


@pytest.mark.parametrize(
    "program",
    [
        double_backward,
        gradient_penalty,
        backward_create_graph,
        retain_graph,
        inputs_and_allow_unused,
        lbfgs,
        closure_sgd,
        step_inside_backward,
        jacobian_and_hessian,
        gradcheck,
        forward_mode,
    ],
)
def test_higher_orders_and_closures(program: Any) -> None:
    assert_transparent(program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    def program() -> Any:
        first, second = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.ReLU()), nn.Linear(8, 1)
        x = torch.randn(5, 4, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(first, x, use_reentrant=reentrant)
            checkpoint(second, hidden, use_reentrant=reentrant).sum().backward()
        return grads(x, *first.parameters(), *second.parameters())

    assert_transparent(program)


def test_checkpoint_keeps_object_identity(level: str) -> None:
    seen = []

    def block(x: torch.Tensor, w: nn.Parameter) -> torch.Tensor:
        seen.append(w)
        return (x * w).exp()

    w = nn.Parameter(torch.ones(3))
    with guarding(level):
        checkpoint(block, torch.ones(3, requires_grad=True), w, use_reentrant=False).sum().backward()
    assert [item is w for item in seen] == [True, True]


def test_save_on_cpu() -> None:
    def program() -> Any:
        x = torch.randn(5, requires_grad=True)
        with save_on_cpu():
            y = (x.exp() * x.sin()).sum()
        y.backward()
        return grads(x)

    assert_transparent(program)


def _count_hooks(counts: list[int]) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return tensor.detach().clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        counts[1] += 1
        return tensor

    return saved_tensors_hooks(pack, unpack)


def test_the_users_saved_tensor_hooks_inside() -> None:
    def program() -> Any:
        counts = [0, 0]
        x = torch.randn(5, requires_grad=True)
        with _count_hooks(counts):
            y = (x.exp() * x.sin()).sum()
        y.backward()
        return grads(x), counts

    assert_transparent(program)


def test_the_users_saved_tensor_hooks_outside(level: str) -> None:
    found = []
    for guarded in (False, True):
        counts = [0, 0]
        x = torch.arange(5.0, requires_grad=True)
        with _count_hooks(counts):
            if guarded:
                with guarding(level):
                    (x.exp() * x.sin()).sum().backward()
            else:
                (x.exp() * x.sin()).sum().backward()
        assert x.grad is not None
        found.append((counts, x.grad.tolist()))
    assert found[0] == found[1]


def test_hooks_on_tensors_nodes_and_modules() -> None:
    def program() -> Any:
        net, log = _net(), []
        net[0].register_forward_pre_hook(lambda m, a: log.append("pre"))
        net[0].register_forward_hook(lambda m, a, out: log.append("forward") or out * 2)
        net[2].register_full_backward_hook(lambda m, gi, go: log.append("backward"))
        net[2].register_full_backward_pre_hook(lambda m, go: log.append("backward pre"))
        net.register_state_dict_pre_hook(lambda *a: log.append("state"))
        x = torch.randn(3, 4, requires_grad=True)
        x.register_hook(lambda grad: grad * 3)
        out = net(x)
        out.retain_grad()
        out.grad_fn.register_prehook(lambda go: log.append("node pre"))
        out.grad_fn.register_hook(lambda gi, go: log.append("node"))
        next(net.parameters()).register_post_accumulate_grad_hook(lambda p: log.append("accumulated"))
        handle = torch.autograd.graph.register_multi_grad_hook(list(net.parameters()), lambda gs: log.append(len(gs)))
        out.sum().backward()
        handle.remove()
        net.state_dict()
        return grads(x, out, *net.parameters()), log

    assert_transparent(program)


def test_autocast() -> None:
    def program() -> Any:
        net = _net()
        x = torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
            inside = torch.is_autocast_enabled("cpu")
        out.float().sum().backward()
        return out, str(out.dtype), inside, torch.is_autocast_enabled("cpu"), grads(x, *net.parameters())

    assert_transparent(program)


def test_inference_mode_inside() -> None:
    def program() -> Any:
        net = _net()
        x = torch.randn(3, 4)
        with torch.inference_mode():
            frozen = net(x)
            frozen.add_(1)
            flags = (frozen.is_inference(), torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        net(x).sum().backward()
        return frozen, flags, torch.is_inference_mode_enabled(), grads(*net.parameters())

    assert_transparent(program)


def test_grad_modes_in_all_forms() -> None:
    @torch.no_grad()
    def measure(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.no_grad()
    def each(x: torch.Tensor) -> Any:
        for item in x:
            yield item.requires_grad, torch.is_grad_enabled()

    def program() -> Any:
        x = torch.randn(3, requires_grad=True)
        found: list[Any] = [measure(x).requires_grad, list(each(x))]
        with torch.set_grad_enabled(False):
            found.append((x * 2).requires_grad)
            with torch.enable_grad():
                found.append((x * 2).requires_grad)
        torch.set_grad_enabled(False)
        found.append((x * 2).requires_grad)
        torch.set_grad_enabled(True)
        return found

    assert_transparent(program)


def test_anomaly_mode_together_with_the_guard() -> None:
    def program() -> Any:
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=False):
            (x.exp() * x).sum().backward()
        with torch.autograd.set_detect_anomaly(True):
            enabled = torch.is_anomaly_enabled()
            x.sin().sum().backward()
        return grads(x), enabled, torch.is_anomaly_enabled()

    assert_transparent(program)


def test_anomaly_mode_still_finds_nan() -> None:
    def program() -> None:
        x = torch.zeros(1, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True):
                (x.sqrt() * 0).sum().backward()

    assert_transparent(program, fails=True)


def test_sparse_tensors() -> None:
    def program() -> Any:
        embedding = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(embedding.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([0, 2, 2])).pow(2).sum().backward()
            optimizer.step()
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.randn(2), (2, 2)).requires_grad_()
        dense = torch.randn(2, 2, requires_grad=True)
        torch.sparse.mm(sparse, dense).sum().backward()
        csr = torch.eye(3).to_sparse_csr()
        return embedding.weight, embedding.weight.grad, dense.grad, sparse.grad, csr @ torch.ones(3, 1), sparse.detach().coalesce()

    assert_transparent(program)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    def program() -> Any:
        a, b = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        nested = torch.nested.as_nested_tensor([a, b], layout=layout)
        linear = nn.Linear(4, 4)
        out = linear(nested)
        pieces = [piece.relu().sum() for piece in out.unbind()]
        torch.stack(pieces).sum().backward()
        return [piece.detach() for piece in out.unbind()], grads(a, b, *linear.parameters())

    torch.set_warn_always(False)  # each time C++ unpacks a nested tensor that is under hooks it makes another, which warns once
    assert_transparent(program)


def test_meta_quantized_and_complex_tensors() -> None:
    def program() -> Any:
        meta = nn.Linear(3, 3, device="meta")(torch.empty(2, 3, device="meta"))
        meta.sum().backward()
        z = torch.randn(3, dtype=torch.cfloat, requires_grad=True)
        (z.conj() * z).real.sum().backward()
        quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
        return tuple(meta.shape), z.grad, quantized.dequantize(), z.detach().conj().imag

    assert_transparent(program)


def test_in_place_and_views() -> None:
    def program() -> Any:
        x = torch.randn(4, 4, requires_grad=True)
        y = x * 1
        y.unsqueeze_(0).squeeze_(0)
        y[0] = 3.0
        y[:, 1].mul_(2)
        y += x
        y.t().add_(1)
        F.relu(y, inplace=True)
        y.sum().backward()
        with torch.no_grad():
            x -= 0.1 * x.grad
            x.clamp_(-1, 1)
        x.data.mul_(0.5)
        x.grad.zero_()
        return x, y, [y._version, x._version], grads(x)

    assert_transparent(program)


def test_requires_grad_toggles_and_numpy() -> None:
    def program() -> Any:
        net = _net()
        for p in net[0].parameters():
            p.requires_grad_(False)
        net(torch.randn(2, 4)).sum().backward()
        before = [p.grad is None for p in net.parameters()]
        for p in net.parameters():
            p.requires_grad = True
        x = torch.randn(2, 4)
        array = x.numpy()
        array[0] = 1
        out = net(torch.from_numpy(array.copy()))
        loss = out.sum()
        loss.backward()
        return before, grads(*net.parameters()), loss.item(), float(loss), out.tolist(), bool(loss > 0), f"{loss.detach():.3f}", len(out)

    assert_transparent(program)


def test_clipping_scaling_schedulers_and_averaging() -> None:
    def program() -> Any:
        net = _net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        scaler = torch.amp.GradScaler("cpu", enabled=True)
        average = torch.optim.swa_utils.AveragedModel(net)
        norms = []
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(net(torch.randn(3, 4)).pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(net)
        return norms, list(net.parameters()), list(average.parameters()), scheduler.get_last_lr()

    assert_transparent(program)


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"differentiable": True}],
    ids=["foreach", "single", "fused", "differentiable"],
)
def test_optimizer_implementations(options: dict[str, bool]) -> None:
    def program() -> Any:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, **options)
        if options.get("differentiable"):
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            clones = [p.clone() for p in net.parameters()]
            optimizer.param_groups[0]["params"] = clones
            for clone, p in zip(clones, net.parameters(), strict=True):
                clone.grad = p.grad
            optimizer.step()
            sum(clone.sum() for clone in clones).backward()
        else:
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(3, 4)).pow(2).mean().backward()
                optimizer.step()
        return list(net.parameters())

    assert_transparent(program)


def test_what_backward_is_given_may_be_read_only_once() -> None:
    def program() -> Any:
        x = torch.randn(3, requires_grad=True)
        losses = [(x * 2).sum(), (x * 3).pow(2).sum()]
        torch.autograd.backward(loss for loss in losses)
        net = nn.Linear(3, 1)
        net(x).sum().backward(inputs=list(net.parameters()))
        net(x).sum().backward(inputs=(p for p in net.parameters()))
        gradients = torch.autograd.grad((x * 2).sum(), (leaf for leaf in [x]))
        return x.grad, grads(*net.parameters()), gradients

    assert_transparent(program)
