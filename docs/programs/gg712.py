from torch.utils.checkpoint import checkpoint
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.Linear(8, 8)
settings = {"deep": True}


def block(x):
    x = layer(x).tanh()
    return layer(x).tanh() if settings["deep"] else x


hidden = checkpoint(block, torch.randn(16, 8), use_reentrant=False)
settings["deep"] = False
hidden.pow(2).mean().backward()
