import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
norms = []


def keep_norm(gradient):
    norms.append(gradient.norm().item())


for parameter in model.parameters():
    parameter.register_hook(keep_norm)
model(torch.randn(16, 4)).pow(2).mean().backward()
