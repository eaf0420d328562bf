# expect: GG303
# names: from_pretrained
import torch
from torch import nn

torch.manual_seed(0)
table = torch.randn(20, 4)
embedding = nn.Embedding.from_pretrained(table)  # BUG
anchor, positive = torch.randint(0, 20, (8,)), torch.randint(0, 20, (8,))
loss = (embedding(anchor) - embedding(positive)).pow(2).sum(1).mean()
loss.backward()
