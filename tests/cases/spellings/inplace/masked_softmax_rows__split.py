# /// case
# title = "Attention scores masked row by row while iterating over the tensor"
# source = "https://github.com/xk-huang/yet-another-vectornet/issues/34"
# outcome = "raises"
# torch_error = "is a view and is being modified inplace"
# cause = "inplace-multi-output-view"
# names = ["row"]
# fix = "mask the whole score matrix with masked_fill"
# ///
import math

import torch
from torch import nn

from masked_softmax_rows__split_parts import VectorNet


torch.manual_seed(0)
valid_len = torch.randint(2, 8, (64,))
vectors = torch.randn(64, 8, 5)
future = (vectors[:, 0, :2].unsqueeze(1) * torch.linspace(0.2, 1.0, 6).view(1, 6, 1)).flatten(1)

model = VectorNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(40):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(vectors, valid_len), future)
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
