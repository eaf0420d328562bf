import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
data = np.random.default_rng(0).normal(size=(16, 4))
inputs = torch.from_numpy(data).float()
loss = model(inputs).pow(2).mean()
loss.backward()
