"""The training steps whose cost under the guard is measured: real models, small enough that Python matters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], None]


def tiny_mlp() -> Step:
    """Two linear layers, batch 32, AdamW: the step is nearly all overhead."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    return _step(model, optimizer, lambda: F.cross_entropy(model(x), y))


def conv_net() -> Step:
    """A small residual-free image classifier, batch 16 of 32x32."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return _step(model, optimizer, lambda: F.cross_entropy(model(x), y))


def transformer() -> Step:
    """Four encoder layers, width 128, batch 8 of 64 tokens."""
    embed = nn.Embedding(1000, 128)
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 4, enable_nested_tensor=False)
    head = nn.Linear(128, 1000)
    model = nn.ModuleList([embed, body, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (8, 65))
    return _step(model, optimizer, lambda: F.cross_entropy(head(body(embed(tokens[:, :-1]))).flatten(0, 1), tokens[:, 1:].flatten()))


def lstm() -> Step:
    """An LSTM cell stepped 50 times in Python, width 64, batch 16."""
    cell, head = nn.LSTMCell(32, 64), nn.Linear(64, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(50, 16, 32), torch.randn(50, 16, 1)

    def loss() -> torch.Tensor:
        h, c = torch.zeros(16, 64), torch.zeros(16, 64)
        outputs = []
        for t in range(50):
            h, c = cell(x[t], (h, c))
            outputs.append(head(h))
        return F.mse_loss(torch.stack(outputs), y)

    return _step(model, optimizer, loss)


def tiny_ops() -> Step:
    """500 elementwise ops on 8 numbers: the worst case, a graph of nothing but overhead."""
    weight = nn.Parameter(torch.randn(8))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    x = torch.randn(8)

    def loss() -> torch.Tensor:
        value = weight * x
        for _ in range(166):
            value = (value * 0.99 + weight).tanh()
        return value.sum()

    return _step(nn.ParameterList([weight]), optimizer, loss)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


WORKLOADS: dict[str, Callable[[], Step]] = {
    "tiny MLP": tiny_mlp,
    "conv net": conv_net,
    "transformer": transformer,
    "LSTM, 50 steps": lstm,
    "500 tiny ops": tiny_ops,
}
