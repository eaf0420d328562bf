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
    label = torch.randint(0, 2, (n,))
    data = torch.randn(n, 1, 4, 8, 8)
    data[label == 1, :, 1:3, 2:6, 2:6] += 1.0
    return TensorDataset(data * contrast, label)


net = nn.Sequential(
    nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(),
    nn.AdaptiveAvgPool3d((2, 4, 4)), nn.Flatten(),
    nn.Linear(8 * 32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
train_loader = DataLoader(volumes(128, 1.0), batch_size=16, shuffle=True)
val_loader = DataLoader(volumes(64, 3.0), batch_size=16)


@torch.no_grad()
def validate(loader):
    total, correct = 0.0, 0
    source = iter(loader)
    while (item_2 := next(source, None)) is not None:
        volume, label = item_2
        logits = net(volume)  # <- culprit
        total += nn.functional.cross_entropy(logits, label, reduction="sum").item()
        correct += (logits.argmax(1) == label).sum().item()
    return total / len(loader.dataset), correct / len(loader.dataset)


source_3 = iter(range(5))
while (item_4 := next(source_3, None)) is not None:
    epoch = item_4
    source_2 = iter(train_loader)
    while (item_3 := next(source_2, None)) is not None:
        volume, label = item_3
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(volume), label)
        loss.backward()
        optimizer.step()
    val_loss, val_acc = validate(val_loader)  # <- related
    scheduler.step(val_loss)
    print(f"epoch {epoch}: train {loss.item():.3f} val {val_loss:.3f} acc {val_acc:.2f}")
