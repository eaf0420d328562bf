import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def make_dataset(n=512):
    images = torch.rand(n, 1, 8, 8)
    labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long()
    return TensorDataset(images, labels)


def small_conv_net_forward(owner, x):
    return owner.classifier(owner.features(x).flatten(1))


class SmallConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(8 * 4 * 4, 2)

    def forward(self, x):
        return small_conv_net_forward(self, x)


def finish_batch(loss, optimizer, total_loss):
    loss.backward()
    optimizer.step()
    total_loss += loss.item()
    return total_loss


def begin_batch(model, images, criterion, labels, optimizer):
    output = model(images)
    loss = criterion(output, labels)
    optimizer.zero_grad()
    return loss


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    total_loss = 0
    for images, labels in loader:
        loss = begin_batch(model, images, criterion, labels, optimizer)
        total_loss = finish_batch(loss, optimizer, total_loss)
    return total_loss / len(loader)


if __name__ == "__main__":
    loader = DataLoader(make_dataset(), batch_size=32, shuffle=True)
    model = SmallConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        mean_loss = train_one_epoch(model, loader, nn.CrossEntropyLoss(), optimizer)
        print(f"epoch {epoch} loss {float(mean_loss):.4f}")
