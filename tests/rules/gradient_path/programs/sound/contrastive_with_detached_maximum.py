import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
encoder = nn.Linear(6, 4)
optimizer = torch.optim.Adam(encoder.parameters())
for _ in range(4):
    z = F.normalize(encoder(torch.randn(8, 6)), dim=1)
    sim = z @ z.t() / 0.2
    logits = sim - sim.max(1, keepdim=True).values.detach()
    mask = 1 - torch.eye(8)
    positives = torch.eye(8).roll(4, 1)
    log_prob = logits - (mask * logits.exp()).sum(1, keepdim=True).log()
    loss = -((positives * log_prob).sum(1) / positives.sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
