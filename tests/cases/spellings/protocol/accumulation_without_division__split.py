# /// case
# title = "Gradient accumulation sums eight mean losses: the step is eight times too large"
# source = "https://github.com/fredzzhang/atlas/pull/26"
# outcome = "silent"
# torch_error = ""
# cause = "accumulation-scale"
# names = ["loss", "accumulation_steps"]
# fix = "divide the loss by accumulation_steps"
# ///
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from accumulation_without_division__split_parts import ContextEncoder, series


def train(model, loader, accumulation_steps=8, epochs=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9)
    criterion = nn.MSELoss()
    optimizer.zero_grad()
    for epoch in range(epochs):
        total = 0.0
        for i, (past, future) in enumerate(loader):
            loss = criterion(model(past), future)
            loss.backward()  # <- culprit
            total += loss.item()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()  # <- related
                optimizer.zero_grad()
        print(f"epoch {epoch}: {total / len(loader):.5f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(ContextEncoder(), DataLoader(series(640), batch_size=8, shuffle=True))
