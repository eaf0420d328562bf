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


class LearnedGrayscale(nn.Module):
    """Weighted sum of the channels, as a 3-channel image for the pretrained stem."""

    def __init__(self):
        super().__init__()
        part = torch.tensor([0.3, 0.59, 0.11])
        self.mix = nn.Parameter(part)

    def forward(self, images):
        part_ = torch.softmax(self.mix, dim=0)
        weights = part_.view(1, 3, 1, 1)
        gray = (images * weights).sum(dim=1, keepdim=True)
        expand_ = gray.expand  # <- culprit
        return expand_(-1, 3, -1, -1)  # <- culprit


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        register_buffer_ = self.register_buffer
        register_buffer_("mean", torch.tensor(mean).view(1, -1, 1, 1))
        register_buffer__2 = self.register_buffer
        register_buffer__2("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images):
        sub__ = images.sub_  # <- culprit  # <- raises
        return sub__(self.mean).div_(self.std)  # <- culprit # <- raises


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
        part__2 = self.conv(self.preprocess(images))
        x = F.relu(part__2)
        mean_ = x.mean
        return self.fc(mean_(dim=(2, 3)))


torch.manual_seed(0)
labels, images = torch.randint(0, 3, (60,)), 0.3 * torch.rand(60, 3, 12, 12)
images[torch.arange(60), 1] += 0.3 * labels.view(-1, 1, 1)

model = GrayClassifier()
part__4 = model.parameters()
optimizer = torch.optim.Adam(part__4, lr=2e-2)
for epoch in range(40):
    part__3 = model(images)
    loss = F.cross_entropy(part__3, labels)
    clear = optimizer.zero_grad
    clear()
    differentiate = loss.backward
    differentiate()
    go = optimizer.step
    go()
    if epoch % 10 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
