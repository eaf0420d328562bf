import torch
from torch import nn

torch.manual_seed(0)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit)


model = nn.Linear(4, 4)
Clamp.apply(model(torch.randn(16, 4)), 1.0).pow(2).mean().backward()
