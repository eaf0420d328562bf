import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 6)
scores, lengths = model(torch.randn(4, 6)), [6, 3, 4, 2]
outside = torch.arange(6) >= torch.tensor(lengths).unsqueeze(1)
scores = scores.masked_fill(outside, float("-inf"))
loss = nn.functional.cross_entropy(scores, torch.tensor([5, 2, 0, 1]))
loss.backward()
