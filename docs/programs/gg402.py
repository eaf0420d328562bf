import torch
from torch import nn

torch.manual_seed(0)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum()


scale = nn.Parameter(torch.ones(4))
Scale.apply(torch.randn(16, 4), scale).pow(2).mean().backward()
