# /// case
# title = "Learned grey conversion expands one channel to three, the normalisation then works in place"
# source = "https://github.com/juliendenize/torchaug/issues/10"
# outcome = "raises"
# torch_error = "more than one element of the written-to tensor refers to a single memory location"
# cause = "inplace-overlapping-memory"
# names = ["gray", "images"]
# fix = "materialise the expanded tensor (repeat, or clone)"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F


def learned_grayscale_forward(owner, images):
    weights = torch.softmax(owner.mix, dim=0).view(1, 3, 1, 1)
    gray = (images * weights).sum(dim=1, keepdim=True)
    return gray.expand(-1, 3, -1, -1)  # <- culprit


class LearnedGrayscale(nn.Module):
    """Weighted sum of the channels, as a 3-channel image for the pretrained stem."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([0.3, 0.59, 0.11]))

    def forward(self, images):
        return learned_grayscale_forward(self, images)


def normalize_forward(owner, images):
    return images.sub_(owner.mean).div_(owner.std)  # <- culprit # <- raises


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images):
        return normalize_forward(self, images)


def gray_classifier_forward(owner, images):
    x = F.relu(owner.conv(owner.preprocess(images)))
    return owner.fc(x.mean(dim=(2, 3)))


class GrayClassifier(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.preprocess = nn.Sequential(
            LearnedGrayscale(),
            Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        )
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.fc = nn.Linear(8, classes)

    def forward(self, images):
        return gray_classifier_forward(self, images)


torch.manual_seed(0)
labels = torch.randint(0, 3, (60,))
images = 0.3 * torch.rand(60, 3, 12, 12)
images[torch.arange(60), 1] += 0.3 * labels.view(-1, 1, 1)

model = GrayClassifier()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)


def finish_batch(loss, optimizer, epoch):
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")


def begin_batch(model, images, labels, optimizer):
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    return loss
for epoch in range(40):
    loss = begin_batch(model, images, labels, optimizer)
    finish_batch(loss, optimizer, epoch)
