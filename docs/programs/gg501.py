import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    inputs, labels = torch.randn(16, 4), torch.randint(0, 3, (16,))
    probs = torch.softmax(200 * model(inputs), dim=1)
    loss = -(nn.functional.one_hot(labels, 3) * probs.log()).sum(dim=1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
