import torch
import torch.nn as nn
batch_size, bptt, hidden_size = 8, 20, 48


class CharLM(nn.Module):
    def __init__(self, n_vocab, emb=24):
        super().__init__()
        self.embed = nn.Embedding(n_vocab, emb)
        self.lstm = nn.LSTM(emb, hidden_size, batch_first=True)
        self.decoder = nn.Linear(hidden_size, n_vocab)

    def forward(self, tokens, state):
        out, state = self.lstm(self.embed(tokens), state)
        return self.decoder(out), state


def batchify(ids):
    n = ids.numel() // batch_size
    return ids[: n * batch_size].view(batch_size, n)
