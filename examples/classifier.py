"""Fine-tune a small convolutional classifier on synthetic images.

`--break`: the new head is put in after the optimizer was made, which goes on updating the old one. Nothing is raised.
"""

import argparse

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def bars(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images of one bar: horizontal, vertical or diagonal."""
    images = 0.3 * torch.randn(count, 1, 16, 16)
    labels = torch.randint(0, 3, (count,))
    for image, label in zip(images, labels.tolist()):
        place = int(torch.randint(2, 14, ()))
        if label == 0:
            image[0, place, :] += 1
        elif label == 1:
            image[0, :, place] += 1
        else:
            image[0] += torch.eye(16)
    return images, labels


def accuracy(model: nn.Module) -> float:
    images, labels = bars(128)
    model.eval()
    with torch.no_grad():
        hits = model(images).argmax(dim=1) == labels
    model.train()
    return hits.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="broken", action="store_true", help="run the program with its bug")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Classifier(classes=10)  # a model made for ten classes; the new task has three
    if options.broken:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model.head = nn.Linear(16, 3)
    else:
        model.head = nn.Linear(16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for step in range(1, options.steps + 1):
        images, labels = bars(32)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy(model):.2f}")


if __name__ == "__main__":
    main()
