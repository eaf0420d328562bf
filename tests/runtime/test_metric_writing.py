"""`writer=`: what reaches it, at which steps, that results stay as they are, and that one that raises costs itself alone."""

from __future__ import annotations

import gc
import logging
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradguard import ConfigError, GradGuardError, gradguard

Written = list[tuple[int, dict[str, float]]]


def train(steps: int, every: int, level: str, writer: Any, *, zero: bool = True, norms: Written | None = None) -> list[torch.Tensor]:
    """Trains a small model; gives its parameters, and what the norms were by layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradguard(model, optimizer, level=level, writer=writer, write_every=every):
            for step in range(1, steps + 1):
                if zero:
                    optimizer.zero_grad()
                loss = model(torch.randn(16, 4)).pow(2).mean()
                loss.backward()
                optimizer.step()
                if norms is not None:
                    layers = {"0": model[0], "2": model[2]}
                    norms.append((step, {name: _norm(layer) for name, layer in layers.items()}))
    return [parameter.detach().clone() for parameter in model.parameters()]


def _norm(layer: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.pow(2).sum()) for p in layer.parameters() if p.grad is not None))


@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_norms_by_layer_in_calm_steps_too(level: str) -> None:
    written: Written = []
    norms: Written = []
    trained = train(400, 30, level, lambda metrics, step: written.append((step, metrics)), norms=norms)
    assert [step for step, _ in written] == [1, *range(30, 401, 30)]
    for step, metrics in written:
        assert metrics.pop("gradguard/diagnoses") == 0.0
        expected = {f"gradguard/grad_norm/{layer}": norm for layer, norm in norms[step - 1][1].items()}
        assert metrics == pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(trained, train(400, 30, level, None), strict=True))


def test_every_kind_of_writer() -> None:
    calls: list[Any] = []

    class Board:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append(("add_scalar", tag, step))

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            calls.append(("log_metrics", sorted(metrics), step))

    class Run:
        def log(self, data: dict[str, float], step: int | None = None) -> None:
            calls.append(("log", sorted(data), step))

    names = ["gradguard/diagnoses", "gradguard/grad_norm/0", "gradguard/grad_norm/2"]
    for writer in (Board(), Logger(), Run()):
        train(1, 1, "watch", writer)
    assert calls == [*(("add_scalar", name, 1) for name in names), ("log_metrics", names, 1), ("log", names, 1)]
    for wrong in (3, object(), Logger, "runs"):
        with pytest.raises(TypeError, match="writer= takes an object with add_scalar"):
            gradguard(writer=wrong)  # type: ignore[arg-type]
    for number in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match=r"write_every=.*: a number of optimizer steps, 1 or more"):
            gradguard(writer=Run(), write_every=number)  # type: ignore[arg-type]


def test_what_was_found() -> None:
    written: Written = []
    train(12, 100, "standard", lambda metrics, step: written.append((step, metrics)), zero=False)
    assert [step for step, _ in written] == [1, 12]  # the first step, and the end
    assert written[-1][1]["gradguard/diagnoses"] == 1.0 and written[-1][1]["gradguard/found/GG601"] >= 1.0
    raised: Written = []
    with pytest.raises(GradGuardError):
        train(12, 100, "strict", lambda metrics, step: raised.append((step, metrics)), zero=False)
    assert raised[-1][1] == {"gradguard/diagnoses": 1.0, "gradguard/found/GG601": 1.0}


def test_a_writer_that_raises_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken(metrics: dict[str, float], step: int) -> None:
        calls.append(step)
        raise OSError("the disk is full")

    with caplog.at_level(logging.ERROR, "gradguard"):
        trained = train(40, 10, "standard", broken)
    assert calls == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "gradguard: writer= raised OSError: the disk is full; it is told nothing more, and training goes on"
    ]
    assert all(torch.equal(one, other) for one, other in zip(trained, train(40, 10, "standard", None), strict=True))

    def interrupted(metrics: dict[str, float], step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(4, 1, "standard", interrupted)


def test_gradients_without_a_norm_here() -> None:
    """Sparse gradients, those of other classes and those that are not finite."""
    written: Written = []

    class Own(torch.Tensor):
        pass

    torch.manual_seed(0)
    embedding, linear, frozen = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1, dtype=torch.float64), nn.Linear(3, 1)
    own = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*embedding.parameters(), *linear.parameters(), *frozen.parameters(), own], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with gradguard(embedding, linear, level="watch", writer=lambda metrics, step: written.append((step, metrics)), write_every=1):
            hidden = embedding(torch.tensor([1, 2])).double()
            (linear(hidden).sum() * float("inf")).backward()
            own.grad = torch.ones(2).as_subclass(Own)  # type: ignore[assignment]
            optimizer.step()
    norms = {name: value for name, value in written[0][1].items() if "grad_norm" in name}
    assert len(norms) == 2 and not any(math.isfinite(value) for value in norms.values()), norms  # weight and bias of a lone layer


def test_a_run_keeps_no_model_alive() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradguard(model, optimizer, writer=lambda metrics, step: None, write_every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
