# expect: GG301
# names: set_grad_enabled
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def run_phase(phase):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    with torch.set_grad_enabled(phase == "training"):  # BUG
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
    if phase == "train":
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


for phase in ("val", "train"):
    run_phase(phase)
