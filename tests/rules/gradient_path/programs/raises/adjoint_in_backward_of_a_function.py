# expect: GG301
# names: backward, enable_grad, custom Function
import torch
from torch import nn

cell = nn.Linear(3, 3)


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state):
        ctx.save_for_backward(state)
        return torch.tanh(cell(state))

    @staticmethod
    def backward(ctx, incoming):
        state = ctx.saved_tensors[0].detach().requires_grad_()
        again = torch.tanh(cell(state))  # BUG
        again.backward(incoming)
        return state.grad


x = torch.randn(2, 3, requires_grad=True)
Adjoint.apply(x).sum().backward()
