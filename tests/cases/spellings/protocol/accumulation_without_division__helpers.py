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


def context_encoder_forward(owner, x):
    h, _ = owner.mix(torch.relu(owner.patch(x)))
    return owner.head(h)


class ContextEncoder(nn.Module):
    def __init__(self, d_model=24):
        super().__init__()
        self.patch = nn.Linear(6, d_model)
        self.mix = nn.LSTM(d_model, d_model, batch_first=True)
        self.head = nn.Linear(d_model, 6)

    def forward(self, x):
        return context_encoder_forward(self, x)


def series(n, length=12):
    phase = torch.rand(n, 1, 6) * 6.28
    speed = 0.3 + 0.5 * torch.rand(n, 1, 6)
    t = torch.arange(length + 1).view(1, -1, 1)
    wave = torch.sin(phase + speed * t)
    return TensorDataset(wave[:, :-1], wave[:, 1:])


def finish_batch(loss, total, i, accumulation_steps, optimizer):
    loss.backward()  # <- culprit
    total += loss.item()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()  # <- related
        optimizer.zero_grad()
    return total


def begin_batch(criterion, model, past, future):
    loss = criterion(model(past), future)
    return loss


def train(model, loader, accumulation_steps=8, epochs=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9)
    criterion = nn.MSELoss()
    optimizer.zero_grad()
    for epoch in range(epochs):
        total = 0.0
        for i, (past, future) in enumerate(loader):
            loss = begin_batch(criterion, model, past, future)
            total = finish_batch(loss, total, i, accumulation_steps, optimizer)
        print(f"epoch {epoch}: {total / len(loader):.5f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(ContextEncoder(), DataLoader(series(640), batch_size=8, shuffle=True))
