import torch
from torch import nn

torch.manual_seed(0)
net = torch.compile(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), backend="aot_eager")
points = torch.randn(16, 2, requires_grad=True)
slope, = torch.autograd.grad(net(points).sum(), points, create_graph=True)
slope.pow(2).mean().backward()
