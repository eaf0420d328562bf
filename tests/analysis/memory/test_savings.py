"""What is said to be freed is what the change frees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradguard import gradguard
from gradguard.analysis.memory.accounting import account
from gradguard.analysis.memory.savings import freed_by_checkpointing, savings
from gradguard.core.account import Account
from gradguard.instrumentation.journal import current_journal
from gradguard.runtime.session import current_session


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Account:
    guard = gradguard(level="watch", memory=True)
    guard.run._memory_told = True
    with guard:
        root = loss()
        return account([root], [("model", model)], (), current_journal())


def test_a_checkpointed_block_frees_what_was_said() -> None:
    model = nn.Sequential(*(Block(32) for _ in range(3)))
    x = torch.randn(16, 32, requires_grad=True)
    plain = of(model, lambda: model(x).sum())
    said = freed_by_checkpointing(plain, "model.1")

    def checkpointed() -> torch.Tensor:
        return model[2](checkpoint(model[1], model[0](x), use_reentrant=False)).sum()

    assert said == plain.total("saved") - of(model, checkpointed).total("saved") > 0


def test_activations_in_place() -> None:
    def chain(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(inplace=inplace), nn.Linear(64, 64), nn.ELU(inplace=inplace), nn.Linear(64, 1))

    x = torch.randn(16, 8)
    found = {inplace: of(model := chain(inplace), lambda model=model: model(x).sum()) for inplace in (False, True)}
    said = sum(each.nbytes for each in savings(found[False]) if "inplace" in each.title)
    assert said == found[False].total("saved") - found[True].total("saved") > 0
    assert not [each for each in savings(found[True]) if "inplace" in each.title]


def test_no_activation_in_place_whose_input_is_read_again() -> None:
    model = nn.ModuleList([nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1)])

    def loss() -> torch.Tensor:
        hidden = model[0](torch.randn(4, 8))
        return model[2](hidden + model[1](hidden)).sum()

    assert not [each for each in savings(of(model, loss)) if "inplace" in each.title]


def test_evaluation_that_records_a_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid(), nn.Linear(64, 1))
    earlier = gradguard(level="watch", memory=True)
    earlier.run._memory_told = True
    with earlier:
        kept = model.eval()(torch.randn(16, 4))
    guard = gradguard(level="watch", memory=True)
    guard.run._memory_told = True
    with guard:
        result = model(torch.randn(32, 4))
        assert guard.run.watch.evaluations.most == 32 * (4 + 64) * 4, "what another run holds is not this one's"
        kept.sum().backward()
        del result, kept
        model.train()
        model(torch.randn(32, 4)).sum().backward()
    assert guard.run.watch.evaluations.most == 32 * (4 + 64) * 4


def test_frozen_statistics_are_no_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid(), nn.Linear(64, 1)).eval()
    guard = gradguard(level="watch", memory=True)
    guard.run._memory_told = True
    with guard:
        for _ in range(2):
            model(torch.randn(32, 4)).sum().backward()
        current_session().saving.facts()
        assert guard.run.watch.evaluations.most == 0
