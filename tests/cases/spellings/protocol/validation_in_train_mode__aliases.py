# /// case
# title = "Validation runs in train mode: dropout is on and the validation data moves the batch-norm statistics"
# source = "https://github.com/wolny/pytorch-3dunet/issues/53"
# outcome = "silent"
# torch_error = ""
# cause = "train-eval-mode"
# names = ["net"]
# fix = "net.eval() before validating, net.train() after it"
# ///
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def volumes(n, contrast):
    label, data = torch.randint(0, 2, (n,)), torch.randn(n, 1, 4, 8, 8)
    data[label == 1, :, 1:3, 2:6, 2:6] += 1.0
    part = data * contrast
    return TensorDataset(part, label)


net = nn.Sequential(
    nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(),
    nn.AdaptiveAvgPool3d((2, 4, 4)), nn.Flatten(),
    nn.Linear(8 * 32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2),
)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau((optimizer := torch.optim.AdamW(net.parameters(), lr=1e-3)), patience=1)
train_loader, val_loader = DataLoader(volumes(128, 1.0), batch_size=16, shuffle=True), DataLoader(volumes(64, 3.0), batch_size=16)


@torch.no_grad()
def validate(loader):
    total, correct = 0.0, 0
    for volume, label in loader:
        logits = net(volume)  # <- culprit
        part_ = nn.functional.cross_entropy(logits, label, reduction="sum")
        total += part_.item()
        part__2 = (logits.argmax(1) == label).sum()
        correct += part__2.item()
    part__3 = total / len(loader.dataset)
    return part__3, correct / len(loader.dataset)


for epoch in range(5):
    for volume, label in train_loader:
        clear = optimizer.zero_grad
        clear()
        part__4 = net(volume)
        loss = nn.functional.cross_entropy(part__4, label)
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
    val_loss, val_acc = validate(val_loader)  # <- related
    go_ = scheduler.step
    go_(val_loss)
    print(f"epoch {epoch}: train {loss.item():.3f} val {val_loss:.3f} acc {val_acc:.2f}")
