import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
images = torch.rand(8, 4, requires_grad=True)
normalised = (images - 0.5) / 0.25
normalised.retain_grad()
loss = nn.functional.cross_entropy(model(normalised), torch.randint(0, 3, (8,)))
loss.backward()
attack = normalised + 0.01 * normalised.grad.sign()
