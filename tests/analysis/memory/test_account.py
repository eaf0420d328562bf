"""The account of memory against an independent count, and what its rows say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gradguard import gradguard
from gradguard.analysis.memory.accounting import account
from gradguard.core.account import Account
from gradguard.instrumentation.journal import current_journal
from tests.memory_models import MODELS, Made


def counted(loss: Callable[[], torch.Tensor], model: nn.Module) -> tuple[int, int]:
    """Bytes of the distinct storages that a hook sees saved: all, and those of parameters and buffers."""
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    owned = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    del result
    return sum(each.nbytes() for each in seen.values()), sum(seen[key].nbytes() for key in owned & seen.keys())


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_sums_are_the_bytes_of_all_saved_storages(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    model, loss = make()
    everything, owned = counted(loss, model)
    with gradguard(model, level="strict"):
        root = loss()
        found = account([root], [("model", model)], (), current_journal())
    for by in (found.by_line, found.by_module, found.by_op):
        assert sum(group.nbytes for group in by()) == everything - owned
        assert sum(group.nbytes for group in by(everything=True)) == everything
    assert None not in [group.key for group in found.by_line()]
    assert {group.key.file for group in found.by_line() if group.key} == {
        __file__.replace("analysis/memory/test_account.py", "memory_models.py")
    }
    assert found.total("parameters") == sum(parameter.nbytes for parameter in model.parameters())


def test_what_the_program_holds_stands_beside() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    found = account([], [(None, model)], [optimizer])
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert found.total("parameters") == found.total("gradients") == size
    assert found.total("buffers") == sum(buffer.nbytes for buffer in model.buffers())
    assert found.total("optimizer state") == 2 * size + 4 * len(list(model.parameters()))
    assert found.total() == sum(row.nbytes for row in found.rows)
    names = {(row.kind, row.name) for row in found.rows}
    assert {("gradients", "0.weight"), ("optimizer state", "2.bias"), ("buffers", "1.running_mean")} <= names


def test_leaves_that_only_an_optimizer_knows_and_sparse_gradients() -> None:
    table = torch.randn(10, 4, requires_grad=True)
    optimizer = torch.optim.SparseAdam([table])
    nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True).sum().backward()
    assert table.grad is not None
    found = account([], [], [optimizer])
    assert found.total("parameters") == table.nbytes
    assert found.total("gradients") == table.grad._values().nbytes + table.grad._indices().nbytes


def rows(found: Account) -> dict[str, tuple[str | None, str, int]]:
    return {str(group.key): (row.saved.module, row.saved.op, row.nbytes) for group in found.by_line() for row in group.rows if row.saved}


def test_a_row_tells_line_operation_and_module() -> None:
    model = nn.ModuleDict({"wide": nn.Linear(4, 100)})
    with gradguard(level="strict"):
        hidden = model["wide"](torch.randn(2, 4))
        loss = torch.sigmoid(hidden).sum()
        found = account([loss], [("net", model)], (), current_journal())
    line = test_a_row_tells_line_operation_and_module.__code__.co_firstlineno
    assert {(str(group.key), group.rows[0].saved.op, group.rows[0].saved.module) for group in found.by_line() if group.rows[0].saved} == {
        (f"test_account.py:{line + 4}", "sigmoid", None),
        (f"test_account.py:{line + 3}", "linear", "net.wide"),
    }
    (sigmoid, linear) = found.of("saved")
    assert (sigmoid.nbytes, sigmoid.shape, linear.shape) == (800, (2, 100), (2, 4))


def test_graphs_of_older_steps_are_told_apart() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[torch.Tensor] = []
    with gradguard(level="strict"):
        for _ in range(4):
            loss = model(torch.randn(8, 4)).exp().sum()
            kept.append(loss)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
        loss = model(torch.randn(8, 4)).exp().sum()
        found = account([*kept, loss], [(None, model)], [optimizer], current_journal())
    assert found.total("saved") == 2 * 8 * 4 * 4
    assert found.total("older graphs") == 4 * found.total("saved")


@pytest.mark.parametrize("order", ["d first", "g first"])
def test_the_other_optimizer_s_step_does_not_age_a_graph(order: str) -> None:
    g, d = nn.Linear(3, 3), nn.Linear(3, 1)
    both = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (g, d)]
    with gradguard(level="strict"):
        for _ in range(3):
            fake = g(torch.randn(5, 3)).tanh()
            d_loss = d(fake.detach()).sum()
            for optimizer in both:
                optimizer.zero_grad()
            d_loss.backward()
            both[1].step()
            score = d(fake).sum()
            found = account([score], [("g", g), ("d", d)], both, current_journal())
            assert found.total("saved") > 0 == found.total("older graphs")
            score.backward()
            both[0].step()


def test_what_checkpointing_and_save_on_cpu_keep_is_counted() -> None:
    block = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(8, 4).requires_grad_()
    loss = checkpoint(block, x, use_reentrant=False).sum()
    found = account([loss], [(None, block)])
    assert [row.shape for row in found.of("saved")] == [(8, 4)]
    with torch.autograd.graph.save_on_cpu():
        loss = x.clone().sigmoid().sum()
    assert [row.shape for row in account([loss]).of("saved")] == [(8, 4)]


def test_hooks_of_the_program_are_not_run() -> None:
    ran: list[Any] = []
    with saved_tensors_hooks(lambda tensor: [0], lambda packed: ran.append(packed)):
        loss = torch.randn(3, requires_grad=True).exp().sum()
    found = account([loss])
    assert not ran and not found.rows and found.hidden == 1


def test_nothing_is_kept_alive() -> None:
    x = torch.randn(3, requires_grad=True)
    loss = x.exp().sum()
    node = weakref.ref(loss)
    found = account([loss])
    del loss
    gc.collect()
    assert node() is None and found.rows


def test_tensors_without_memory_count_nothing() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    assert account([], [(None, model)]).total() == 0
    account([nested.relu()], [], [torch.optim.SGD([nested], lr=0.1)])
