import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    inputs, labels = torch.randn(16, 8), torch.randint(0, 4, (16,))
    probs = torch.softmax(model(inputs), dim=1)
    probs = probs.clamp(min=0.1)
    loss = nn.functional.nll_loss(probs.log(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
