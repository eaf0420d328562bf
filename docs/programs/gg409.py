import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
images = torch.rand(8, 4, requires_grad=True)
noisy = images + 0.1 * torch.randn(8, 4)
frozen = model(noisy)
frozen.requires_grad = False
loss = (model(images) - frozen).pow(2).mean()
loss.backward()
