import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
offset = 0.0
for _ in range(4):
    x = torch.from_numpy(rows)
    out = model(x)
    shown = out.detach().numpy().mean()
    share = torch.tensor(float((out > 0).float().mean()))
    loss = nn.functional.mse_loss(out, x.sum(1, keepdim=True)) + torch.from_numpy(np.asarray(rows.mean()))
    loss = loss + 0.5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    offset = loss.item()
