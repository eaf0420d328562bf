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
