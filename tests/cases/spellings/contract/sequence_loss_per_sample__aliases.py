# /// case
# title = "Word recogniser's loss is a vector with one entry per sequence"
# source = "https://github.com/mindee/doctr/pull/379"
# outcome = "raises"
# torch_error = "grad can be implicitly created only for scalar outputs"
# cause = "non-scalar-root"
# names = ["seq_loss", "loss"]
# fix = "reduce the per-sequence losses with .mean()"
# ///
import torch
from torch import nn
import torch.nn.functional as F

VOCAB, MAX_LEN = 12, 7


class WordRecogniser(nn.Module):
    """Reads a word image (here: a feature vector) and emits one distribution per character slot."""

    def __init__(self, in_dim=24, hidden=48):
        super().__init__()
        part = nn.Linear(in_dim, hidden)
        self.backbone = nn.Sequential(part, nn.ReLU())
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.classifier = nn.Linear(hidden, VOCAB)

    def forward(self, images):
        backbone_ = self.backbone
        feats = backbone_(images)
        part_ = feats.unsqueeze(1).expand(-1, MAX_LEN, -1)
        out, _ = self.decoder(part_)
        classifier_ = self.classifier
        return classifier_(out)

    def compute_loss(self, logits, chars, seq_len, sample_weight):
        part__2 = logits.permute(0, 2, 1)  # <- related
        ce = F.cross_entropy(part__2, chars, reduction="none")  # <- related
        ce = ce.masked_fill((pad := torch.arange(MAX_LEN)[None, :] >= seq_len[:, None]), 0.0)
        part__3 = ce.sum(1)
        seq_loss = part__3 / seq_len.float()
        return seq_loss * sample_weight  # <- culprit


def make_batch(n=32):
    images = F.one_hot((chars := torch.randint(0, VOCAB, (n, MAX_LEN)))[:, :2], VOCAB).float().flatten(1)
    seq_len = torch.randint(2, MAX_LEN + 1, (n,))
    chars[:, 2:] = (chars[:, :1] + torch.arange(2, MAX_LEN)) % VOCAB
    return images, chars, seq_len, 0.5 + torch.rand(n)


def main():
    torch.manual_seed(0)
    model = WordRecogniser()
    parameters_ = model.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=3e-3)
    for step in range(120):
        images, chars, seq_len, weight = make_batch()
        loss = model.compute_loss((logits := model(images)), chars, seq_len, weight)
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        go = optimizer.step
        go()
        if step % 30 == 0:
            print(step, loss)


if __name__ == "__main__":
    main()
