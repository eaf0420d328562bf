# /// case
# title = "Epoch loss is summed up and backpropagated for every batch"
# source = "https://discuss.pytorch.org/t/runtimeerror-trying-to-backward-through-the-graph-a-second-time-but-the-buffers-have-already-been-freed-specify-retain-graph-true-when-calling-backward-the-first-time/6795/2"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-accumulated-loss"
# names = ["total_loss"]
# fix = "backward on the batch loss, accumulate loss.item()"
# ///
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def make_dataset(n=512):
    images = torch.rand(n, 1, 8, 8)
    labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long()
    return TensorDataset(images, labels)


class SmallConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(8 * 4 * 4, 2)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    total_loss = 0
    source = iter(loader)
    while (item := next(source, None)) is not None:
        images, labels = item
        output = model(images)
        total_loss += criterion(output, labels)  # <- culprit
        optimizer.zero_grad()
        total_loss.backward()  # <- raises
        optimizer.step()
    return total_loss / len(loader)


if __name__ == "__main__":
    loader = DataLoader(make_dataset(), batch_size=32, shuffle=True)
    model = SmallConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    source_2 = iter(range(5))
    while (item_2 := next(source_2, None)) is not None:
        epoch = item_2
        mean_loss = train_one_epoch(model, loader, nn.CrossEntropyLoss(), optimizer)
        print(f"epoch {epoch} loss {float(mean_loss):.4f}")
