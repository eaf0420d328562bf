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
        self.enc = nn.Sequential(nn.Linear(vocab, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, topics)
        self.logvar = nn.Linear(hidden, topics)
        self.dec = nn.Sequential(nn.Linear(topics, hidden), nn.ReLU(), nn.Linear(hidden, vocab))

    def encode(self, counts):
        h = self.enc(counts)  # <- culprit
        return self.mu(h), self.logvar(h)  # <- related

    def reparameterise(self, mu, logvar):
        std = torch.exp(0.5 * logvar)  # <- culprit
        return mu + std * torch.randn_like(std)

    def forward(self, counts):
        mu, logvar = self.encode(counts)
        z = self.reparameterise(mu, logvar)
        return torch.sigmoid(self.dec(z)), mu, logvar


def elbo(present, probs, mu, logvar):
    rec = F.binary_cross_entropy(probs, present, reduction="sum")  # <- raises
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum()
    return (rec + 0.2 * kl) / len(present)


def corpus(n=640, vocab=60, topics=6):
    topic_word = torch.rand(topics, vocab) ** 6
    mix = torch.distributions.Dirichlet(torch.full((topics,), 0.2)).sample((n,))
    length = torch.empty(n, 1).log_normal_(2.5, 0.4)
    length[500] = 60000.0
    return torch.poisson(length * (mix @ topic_word))


def main():
    torch.manual_seed(0)
    docs = corpus()
    model = TopicVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    source_2 = iter(range(15))
    while (item_3 := next(source_2, None)) is not None:
        epoch = item_3
        total = 0.0
        source = iter(docs.split(32))
        while (item_2 := next(source, source)) is not source:
            counts = item_2
            loss = elbo((counts > 0).float(), *model(counts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total / 20)


if __name__ == "__main__":
    main()
