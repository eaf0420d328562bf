# expect: GG301
# names: Energy.forward, enable_grad, custom Function
import torch


class Energy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, position):
        point = position.detach().requires_grad_()
        potential = (point**4).sum()  # BUG
        (force,) = torch.autograd.grad(potential, point)
        ctx.save_for_backward(force)
        return potential.detach()

    @staticmethod
    def backward(ctx, grad):
        (force,) = ctx.saved_tensors
        return grad * force


x = torch.randn(3, requires_grad=True)
Energy.apply(x).backward()
