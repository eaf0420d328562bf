# expect: GG309
# names: points
import torch
from torch import nn

net = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1))
points = torch.rand(32, 2, requires_grad=True)
points = (points * 2 - 1).detach()  # BUG
field = net(points)
slope = torch.autograd.grad(field.sum(), points, create_graph=True)[0]
(slope.norm(dim=1) - 1).pow(2).mean().backward()
