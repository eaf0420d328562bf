import torch
from torch import nn

torch.manual_seed(0)
model = nn.Conv2d(3, 4, 3)
gray = torch.rand(8, 1, 16, 16)
images = gray.expand(-1, 3, -1, -1)
images.sub_(0.5).div_(0.25)
model(images).mean().backward()
