# /// case
# title = "Raw word counts drive the log-variance so high that exp overflows; BCE then sees NaN"
# source = "https://github.com/vanderschaarlab/synthcity/issues/331"
# outcome = "raises"
# torch_error = "all elements of input should be between 0 and 1"
# cause = "nonfinite-forward"
# names = ["std", "logvar", "counts"]
# fix = "compress the counts (log1p) or clamp logvar before it is exponentiated"
# ///
import torch
from torch import nn
import torch.nn.functional as F


class TopicVAE(nn.Module):
    """Bag-of-words VAE: raw word counts in, probability of each word being present out."""

    def __init__(self, vocab=60, hidden=40, topics=6):
        super().__init__()
        part = nn.Linear(vocab, hidden)
        self.enc = nn.Sequential(part, nn.ReLU())
        self.mu = nn.Linear(hidden, topics)
        self.logvar = nn.Linear(hidden, topics)
        part_ = nn.Linear(topics, hidden)
        self.dec = nn.Sequential(part_, nn.ReLU(), nn.Linear(hidden, vocab))

    def encode(self, counts):
        return self.mu((h := self.enc(counts))), self.logvar(h)  # <- culprit # <- related

    def reparameterise(self, mu, logvar):
        part__2 = 0.5 * logvar  # <- culprit
        std = torch.exp(part__2)  # <- culprit
        return mu + std * torch.randn_like(std)

    def forward(self, counts):
        encode_ = self.encode
        mu, logvar = encode_(counts)
        reparameterise_ = self.reparameterise
        z = reparameterise_(mu, logvar)
        dec_ = self.dec
        return torch.sigmoid(dec_(z)), mu, logvar


def elbo(present, probs, mu, logvar):
    rec = F.binary_cross_entropy(probs, present, reduction="sum")  # <- raises
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum()
    return (rec + 0.2 * kl) / len(present)


def corpus(n=640, vocab=60, topics=6):
    topic_word, mix = torch.rand(topics, vocab) ** 6, torch.distributions.Dirichlet(torch.full((topics,), 0.2)).sample((n,))
    part__3 = torch.empty(n, 1)
    length = part__3.log_normal_(2.5, 0.4)
    length[500] = 60000.0
    part__4 = length * (mix @ topic_word)
    return torch.poisson(part__4)


def main():
    torch.manual_seed(0)
    docs = corpus()
    model = TopicVAE()
    part__6 = model.parameters()
    optimizer = torch.optim.Adam(part__6, lr=2e-3)
    for epoch in range(15):
        total = 0.0
        for counts in docs.split(32):
            part__5 = (counts > 0).float()
            loss = elbo(part__5, *model(counts))
            clear = optimizer.zero_grad
            clear()
            differentiate = loss.backward
            differentiate()
            go = optimizer.step
            go()
            item_ = loss.item
            total += item_()
        print(epoch, total / 20)


if __name__ == "__main__":
    main()
