import torch as th
import torch.nn as nn
from torch.nn import CrossEntropyLoss, Embedding, LSTM, Linear, Module


class WordModel(Module):
    def __init__(self, ntoken=20, ninp=16, nhid=32):
        super().__init__()
        self.encoder = Embedding(num_embeddings=ntoken, embedding_dim=ninp)
        self.rnn = LSTM(ninp, nhid)
        self.decoder = Linear(in_features=nhid, out_features=ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return th.flatten(self.decoder(output), 0, 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 32), weight.new_zeros(1, bsz, 32)


def repackage_hidden(hidden):
    return tuple(th.detach(h) for h in hidden)


def get_batch(source, i, bptt):
    return source[i:i + bptt], th.flatten(source[i + 1:i + 1 + bptt])


def train(model, corpus, lr=2.0, bptt=10, clip=0.25, epochs=6):
    criterion = CrossEntropyLoss()
    for epoch in range(epochs):
        hidden = model.init_hidden(corpus.size(1))
        for i in range(0, corpus.size(0) - 1 - bptt, bptt):
            data, targets = get_batch(corpus, i, bptt)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            # helps with exploding gradients in RNNs
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with th.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-lr)
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    th.manual_seed(0)
    start = th.randint(0, 20, (1, 8))
    corpus = (start + 3 * th.unsqueeze(th.arange(101), 1)) % 20
    train(WordModel(), corpus)
