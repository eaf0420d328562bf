import torch
from torch import nn

torch.manual_seed(0)
points = torch.randn(6, 2, requires_grad=True)
distances = torch.cdist(points, 2 * points)
force, = torch.autograd.grad(distances.sum(), points, create_graph=True)
force.pow(2).sum().backward()
