import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    model.train()
    for step in range(5):
        loss = nn.functional.mse_loss(model(torch.randn(16, 4)), torch.randn(16, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"validation {nn.functional.mse_loss(model(torch.randn(64, 4)), torch.randn(64, 1)):.2f}")
