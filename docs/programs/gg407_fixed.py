import torch
from torch import nn

torch.manual_seed(0)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * torch.cos(x)


model = nn.Linear(1, 1)
x = torch.rand(16, 1, requires_grad=True)
slope, = torch.autograd.grad(Sine.apply(model(x)).sum(), x, create_graph=True)
(slope - 1).pow(2).mean().backward()
