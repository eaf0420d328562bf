# expect: GG309
# names: image
import torch
from torch import nn

model = nn.Linear(4, 3)


def saliency(image, label):
    score = model(image)[0, label]
    score.backward()
    return image.grad.abs().max(dim=1)  # BUG


saliency(torch.rand(1, 4), 1)
