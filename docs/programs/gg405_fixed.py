import torch
from torch import nn

torch.manual_seed(0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.linear(x * self.scale)


device = "meta"  # as any device that is not the CPU
model = Scaled().to(device)
model(torch.randn(2, 3, device=device)).sum().backward()
