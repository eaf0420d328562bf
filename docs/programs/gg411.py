import torch
from torch import nn

torch.manual_seed(0)
device = "cpu"
scale = torch.randn(4, requires_grad=True) * 0.01
optimizer = torch.optim.SGD([scale], lr=0.1)
loss = (scale * torch.randn(16, 4)).pow(2).mean()
loss.backward()
optimizer.step()
