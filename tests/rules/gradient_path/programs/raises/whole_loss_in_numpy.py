# expect: GG302
# names: numpy
import numpy as np
import torch
from torch import nn


def relative_error(pred, target):
    pred = pred.detach().numpy()  # BUG
    target = target.numpy()
    return np.mean(np.abs(pred - target) / (np.abs(target) + 1e-3))


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    x = torch.randn(8, 4)
    loss = torch.from_numpy(np.asarray(relative_error(model(x), x.sum(1, keepdim=True))))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
