"""Ten models that save in ten ways; each function gives what is trained and a loss of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Made = tuple[nn.Module, Callable[[], torch.Tensor]]


def conv_net() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 64, 4)
    )
    x, y = torch.randn(4, 3, 16, 16), torch.randint(4, (4,))
    return model, lambda: F.cross_entropy(model(x), y)


def transformer() -> Made:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 6, 16)
    return model, lambda: model(x).pow(2).mean()


def lstm() -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 8)
            self.rnn = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            seen = []
            for i in range(x.shape[1]):
                state = self.cell(x[:, i], state)
                seen.append(state[0])
            out, _ = self.rnn(torch.stack(seen, 1))
            return out.tanh().sum()

    model, x = Net(), torch.randn(3, 5, 4)
    return model, lambda: model(x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        middle = (x * weight).exp()
        ctx.save_for_backward(x, weight, middle)
        return middle.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, middle = ctx.saved_tensors
        inner = grad * middle.cos() * middle
        return inner * weight, (inner * x).sum(0)


def custom_function() -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scaled.apply(self.first(x), self.weight).sum()

    model, x = Net(), torch.randn(5, 4)
    return model, lambda: model(x)


def checkpointed() -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
            self.block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            h = checkpoint(self.block, h, use_reentrant=False)
            h = checkpoint(self.block, h, use_reentrant=True)
            return self.last(h).sum()

    model, x = Net(), torch.randn(5, 4)
    return model, lambda: model(x)


def tied_weights() -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.out(torch.sigmoid(self.embed(x))), x)

    model, x = Net(), torch.randint(10, (7,))
    return model, lambda: model(x)


def views() -> Made:
    model = nn.Linear(6, 12)
    x = torch.randn(4, 6)

    def loss() -> torch.Tensor:
        a, b, c = model(x).chunk(3, dim=1)
        wide = torch.cat([a, b.t().t()], 1)[:, 1:5]
        return (wide * c.reshape(4, 4)).unsqueeze(0).expand(2, 4, 4).exp().sum() + (a[:, ::2] * b[:, :2]).sum()

    return model, loss


def gan() -> Made:
    model = nn.ModuleDict({"g": nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 4)), "d": nn.Linear(4, 1)})
    z, real = torch.randn(6, 3), torch.randn(6, 4)

    def loss() -> torch.Tensor:
        fake = model["g"](z)
        ones = torch.ones(6, 1)
        score = F.binary_cross_entropy_with_logits(model["d"](real), ones) + F.binary_cross_entropy_with_logits(
            model["d"](fake.detach()), 0 * ones
        )
        return score + F.binary_cross_entropy_with_logits(model["d"](fake), ones)

    return model, loss


def inplace_relu() -> Made:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3), nn.ReLU(True), nn.Dropout(0.2, inplace=True))
    x = torch.randn(3, 2, 12)
    return model, lambda: model(x).mean()


def complex_numbers() -> Made:
    model = nn.Linear(5, 5, dtype=torch.complex64)
    x = torch.randn(4, 5)

    def loss() -> torch.Tensor:
        spectrum = model(torch.fft.fft(x))
        return (spectrum * spectrum.conj()).real.log1p().sum() + torch.view_as_real(spectrum).pow(2).sum()

    return model, loss


MODELS = [conv_net, transformer, lstm, custom_function, checkpointed, tied_weights, views, gan, inplace_relu, complex_numbers]
