# /// case
# title = "Hand-written SGD update of parameters outside torch.no_grad()"
# source = "https://github.com/pytorch/examples/pull/779"
# outcome = "raises"
# torch_error = "a leaf Variable that requires grad is being used in an in-place operation"
# cause = "inplace-leaf"
# names = ["p"]
# fix = "do the update under torch.no_grad()"
# ///
import torch
import torch.nn as nn


class WordModel(nn.Module):
    def __init__(self, ntoken=20, ninp=16, nhid=32):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 32), weight.new_zeros(1, bsz, 32)


def repackage_hidden(hidden):
    return tuple(h.detach() for h in hidden)


def get_batch(source, i, bptt):
    return source[i:i + bptt], source[i + 1:i + 1 + bptt].flatten()


def train(model, corpus, lr=2.0, bptt=10, clip=0.25, epochs=6):
    criterion = nn.CrossEntropyLoss()
    source_4 = iter(range(epochs))
    while (item_4 := next(source_4, None)) is not None:
        epoch = item_4
        hidden = model.init_hidden(corpus.size(1))
        source_3 = iter(range(0, corpus.size(0) - 1 - bptt, bptt))
        while (item_3 := next(source_3, None)) is not None:
            i = item_3
            data, targets = get_batch(corpus, i, bptt)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            # helps with exploding gradients in RNNs
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            source_2 = iter(model.parameters())
            while (item_2 := next(source_2, source_2)) is not source_2:
                p = item_2
                p.add_(p.grad, alpha=-lr)  # <- culprit # <- raises
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    start = torch.randint(0, 20, (1, 8))
    corpus = (start + 3 * torch.arange(101).unsqueeze(1)) % 20
    train(WordModel(), corpus)
