# expect: GG301
# names: fit, enable_grad, hooks run in backward
import torch
from torch import nn

net, critic = nn.Linear(4, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)


def fit(gradient):
    score = critic(gradient).pow(2).mean()  # BUG
    score.backward()


h = net(torch.randn(5, 4))
h.register_hook(fit)
h.sum().backward()
