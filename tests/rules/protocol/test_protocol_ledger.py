"""The ledger keeps nothing alive, stays small over many steps, and sleeps between its windows."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from gradguard import gradguard
from gradguard.runtime.session import current_session


def _train(net: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(4, 3)).pow(2).mean().backward()
        opt.step()


def test_gradients_parameters_and_optimizers_die_as_without_the_guard() -> None:
    gc.disable()
    try:
        with gradguard(level="watch"):
            net = nn.Linear(3, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            _train(net, opt, 100)
            grad = weakref.ref(net.weight.grad)
            opt.zero_grad()
            assert grad() is None
            parameter, optimizer = weakref.ref(net.weight), weakref.ref(opt)
            del net, opt
            gc.collect()  # torch's optimizers are in a cycle of their own, with the guard or without
            assert parameter() is None and optimizer() is None
    finally:
        gc.enable()


def test_ledger_stays_small_over_many_steps() -> None:
    with gradguard(level="watch"):
        net = nn.Linear(3, 1)
        opt = torch.optim.SGD(net.parameters(), lr=1e-4)
        _train(net, opt, 3000)
        current_session().catch_up()
        ledger = current_session().guards[0].run.ledger
        assert ledger.steps == 3000 and ledger.backwards == 3000
        assert len(ledger.retained.tags) <= 48
        (book,) = [book for book in ledger.books.values() if book.ref() is opt]
        assert sum(len(slot.parts) for slot in book.slots) <= 2
        assert len(ledger.contributions.wastes) == 0


def test_what_goes_wrong_late_is_found_in_a_later_window() -> None:
    import warnings

    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gradguard(level="watch"):
            net = nn.Linear(3, 1)
            opt = torch.optim.SGD(net.parameters(), lr=1e-4)
            _train(net, opt, 200)
            for _ in range(300):
                net(torch.randn(4, 3)).pow(2).mean().backward()
                opt.step()
        found = [d.name for w in caught if (d := getattr(w.message, "diagnosis", None)) is not None]
    assert found == ["stale-gradients"]
