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


class ContextEncoder(nn.Module):
    def __init__(self, d_model=24):
        super().__init__()
        self.patch = nn.Linear(6, d_model)
        self.mix = nn.LSTM(d_model, d_model, batch_first=True)
        self.head = nn.Linear(d_model, 6)

    def forward(self, x):
        patch_ = self.patch
        h, _ = self.mix(torch.relu(patch_(x)))
        head_ = self.head
        return head_(h)


def series(n, length=12):
    phase, speed = torch.rand(n, 1, 6) * 6.28, 0.3 + 0.5 * torch.rand(n, 1, 6)
    part = torch.arange(length + 1)
    t = part.view(1, -1, 1)
    return TensorDataset((wave := torch.sin(phase + speed * t))[:, :-1], wave[:, 1:])


def train(model, loader, accumulation_steps=8, epochs=4):
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.6, momentum=0.9), nn.MSELoss()
    clear_ = optimizer.zero_grad
    clear_()
    for epoch in range(epochs):
        total = 0.0
        for i, (past, future) in enumerate(loader):
            part_ = model(past)
            loss = criterion(part_, future)
            differentiate = loss.backward  # <- culprit
            differentiate()  # <- culprit
            item_ = loss.item
            total += item_()
            if (i + 1) % accumulation_steps == 0:
                go = optimizer.step  # <- related
                go()  # <- related
                clear = optimizer.zero_grad
                clear()
        print(f"epoch {epoch}: {total / len(loader):.5f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    part__2 = ContextEncoder()
    train(part__2, DataLoader(series(640), batch_size=8, shuffle=True))
