import torch as th
from torch import nn
from torch.nn import AdaptiveAvgPool3d, BatchNorm3d, Conv3d, Dropout, Flatten, Linear, ReLU, Sequential
from torch.utils.data import DataLoader, TensorDataset

th.manual_seed(0)


def volumes(n, contrast):
    label = th.randint(0, 2, (n,))
    data = th.randn(n, 1, 4, 8, 8)
    data[label == 1, :, 1:3, 2:6, 2:6] += 1.0
    return TensorDataset(data * contrast, label)


net = Sequential(
    Conv3d(1, 8, 3, padding=1), BatchNorm3d(num_features=8), ReLU(),
    AdaptiveAvgPool3d(output_size=(2, 4, 4)), Flatten(),
    Linear(in_features=8 * 32, out_features=32), ReLU(), Dropout(p=0.5), Linear(in_features=32, out_features=2),
)
optimizer = th.optim.AdamW(net.parameters(), 1e-3)
scheduler = th.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
train_loader = DataLoader(volumes(128, 1.0), batch_size=16, shuffle=True)
val_loader = DataLoader(volumes(64, 3.0), batch_size=16)


@th.no_grad()
def validate(loader):
    net.eval()
    total, correct = 0.0, 0
    for volume, label in loader:
        logits = net(volume)
        total += nn.functional.cross_entropy(logits, label, reduction="sum").item()
        correct += th.sum(th.argmax(logits, 1) == label).item()
    net.train()
    return total / len(loader.dataset), correct / len(loader.dataset)


for epoch in range(5):
    for volume, label in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(volume), label)
        loss.backward()
        optimizer.step()
    val_loss, val_acc = validate(val_loader)
    scheduler.step(val_loss)
    print(f"epoch {epoch}: train {loss.item():.3f} val {val_loss:.3f} acc {val_acc:.2f}")
