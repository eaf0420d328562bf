"""Small trainings of four kinds, for comparing runs with and without a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], torch.Tensor]


class Training:
    """A model, its optimizer and a source of batches, all from the global random state."""

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: type[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        self.model = model
        self.batch = batch
        self.loss = loss
        self.optimizer = optimizer(model.parameters(), **options)

    def step(self) -> torch.Tensor:
        """One training step; returns the loss, detached."""
        self.optimizer.zero_grad()
        x, y = self.batch()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        """Parameters, buffers, gradients and the optimizer's own tensors."""
        found = [*self.model.parameters(), *self.model.buffers()]
        found += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        found += [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in found]


def mlp() -> Training:
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(inplace=True), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
    return Training(model, lambda: (torch.randn(8, 12), torch.randn(8, 4)), F.mse_loss, torch.optim.SGD, lr=0.05, momentum=0.9)


def conv() -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
    return Training(model, lambda: (torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))), F.cross_entropy, torch.optim.AdamW, lr=1e-3)


def transformer() -> Training:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 20))
    return Training(
        model,
        lambda: (torch.randint(0, 20, (4, 7)), torch.randint(0, 20, (4, 7))),
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        torch.optim.Adam,
        lr=1e-3,
    )


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(x)
        return self.head(out)


def lstm() -> Training:
    return Training(_Tagger(), lambda: (torch.randn(5, 9, 6), torch.randn(5, 9, 3)), F.mse_loss, torch.optim.RMSprop, lr=1e-3)


WORKLOADS = {"mlp": mlp, "conv": conv, "transformer": transformer, "lstm": lstm}
