import torch
from torch import nn

net, critic = nn.Linear(4, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*net.parameters(), *critic.parameters()], lr=0.1)


class Energy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, position):
        with torch.enable_grad():
            point = position.detach().requires_grad_()
            potential = (point**2).sum()
        (force,) = torch.autograd.grad(potential, point)
        ctx.save_for_backward(force)
        return potential.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def fit(gradient):
    with torch.enable_grad():
        score = critic(gradient.detach()).pow(2).mean()
    score.backward()
    return gradient * 1.0


for _ in range(3):
    optimizer.zero_grad()
    h = net(torch.randn(5, 4))
    h.register_hook(fit)
    Energy.apply(h).backward()
    optimizer.step()
