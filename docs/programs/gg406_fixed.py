import torch
from torch import nn

torch.manual_seed(0)
points = torch.randn(6, 2, requires_grad=True)
differences = points.unsqueeze(1) - 2 * points
distances = differences.pow(2).sum(dim=2).sqrt()
force, = torch.autograd.grad(distances.sum(), points, create_graph=True)
force.pow(2).sum().backward()
