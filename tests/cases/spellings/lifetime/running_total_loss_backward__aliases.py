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
        part = nn.Conv2d(1, 8, 3, padding=1)
        self.features = nn.Sequential(part, nn.ReLU(), nn.MaxPool2d(2))
        part_ = 8 * 4 * 4
        self.classifier = nn.Linear(part_, 2)

    def forward(self, x):
        features_ = self.features
        return self.classifier(features_(x).flatten(1))


def train_one_epoch(model, loader, criterion, optimizer):
    train_ = model.train
    train_()
    total_loss = 0
    for images, labels in loader:
        output = model(images)
        total_loss += criterion(output, labels)  # <- culprit
        clear = optimizer.zero_grad
        clear()
        differentiate = total_loss.backward  # <- raises
        differentiate()  # <- raises
        go = optimizer.step
        go()
    return total_loss / len(loader)


if __name__ == "__main__":
    loader, model = DataLoader(make_dataset(), batch_size=32, shuffle=True), SmallConvNet()
    part__2 = model.parameters()
    optimizer = torch.optim.Adam(part__2, lr=5e-3)
    for epoch in range(5):
        mean_loss = train_one_epoch(model, loader, nn.CrossEntropyLoss(), optimizer)
        print(f"epoch {epoch} loss {float(mean_loss):.4f}")
