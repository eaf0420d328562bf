import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
points = torch.rand(32, 2)
x, y = points[:, :1].requires_grad_(), points[:, 1:].requires_grad_()
u = net(points)
du_dx, = torch.autograd.grad(u.sum(), x, create_graph=True)
du_dx.pow(2).mean().backward()
