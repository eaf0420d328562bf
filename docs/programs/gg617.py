import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(8, 4), nn.Linear(4, 2)


def train(optimizer, steps):
    for step in range(steps):
        inputs, labels = torch.randn(16, 8), torch.randint(0, 2, (16,))
        loss = nn.functional.cross_entropy(head(encoder(inputs)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


first = torch.optim.Adam([*head.parameters(), *encoder.parameters()])
train(first, 3)
resumed = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
resumed.load_state_dict(first.state_dict())
train(resumed, 3)
