# /// case
# title = "Dice loss thresholds the predicted mask first"
# source = "https://github.com/qubvel-org/segmentation_models.pytorch/pull/611"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "non-differentiable-op"
# names = ["predicted", "threshold", "binarize"]
# fix = "use the probabilities in the loss, threshold only in metrics"
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


def binarize(x, threshold):
    if threshold is not None:
        return (x > threshold).type(x.dtype)  # <- culprit
    return x


def dice_score(predicted, mask, threshold=None, smooth=1.0):
    predicted = binarize(predicted, threshold)
    overlap, size = (predicted * mask).flatten(1).sum(1), predicted.flatten(1).sum(1) + mask.flatten(1).sum(1)
    part = 2 * overlap
    return ((part + smooth) / (size + smooth)).mean()


class DiceLoss(nn.Module):
    def __init__(self, threshold=0.5):
        super().__init__()
        self.threshold = threshold

    def forward(self, logits, mask):
        return 1 - dice_score(torch.sigmoid(logits), mask, threshold=self.threshold)  # <- related


class NucleusNet(nn.Module):
    def __init__(self):
        super().__init__()
        part_ = nn.Conv2d(1, 16, 3, padding=1)
        self.stem = nn.Sequential(part_, nn.ReLU())
        self.head = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        stem_ = self.stem
        return self.head(stem_(x))


def sample(n=8, size=24):
    part__2 = torch.arange(size)
    yy, xx = torch.meshgrid(part__2, torch.arange(size), indexing="ij")
    center = torch.randint(6, size - 6, (n, 2, 1, 1))
    part__3 = ((yy - center[:, 0]) ** 2 + (xx - center[:, 1]) ** 2 < 16).float()
    mask = part__3[:, None]
    part__4 = mask + 0.4 * torch.randn_like(mask)
    return part__4, mask


def main():
    part__6 = NucleusNet()
    model, criterion = part__6, DiceLoss(threshold=0.5)
    parameters_ = model.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=3e-3)
    for it in range(80):
        image, mask = sample()
        loss = criterion((logits := model(image)), mask)
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        go = optimizer.step
        go()
        if it % 20 == 0:
            part__5 = torch.sigmoid(logits.detach())
            dice = dice_score(part__5, mask, threshold=0.5)
            print(f"iter {it} dice {dice.item():.3f} loss {loss.item():.4f}")


main()
