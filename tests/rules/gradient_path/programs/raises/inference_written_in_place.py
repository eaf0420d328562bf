# expect: GG305
# names: inference_mode, running
import torch
from torch import nn


@torch.inference_mode()  # BUG
def initial_mean(model, x):
    return model(x).mean(0)


model = nn.Linear(4, 3)
running = initial_mean(model, torch.randn(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    out = model(torch.randn(16, 4))
    running.mul_(0.9).add_(0.1 * out.detach().mean(0))
    loss = (out - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
