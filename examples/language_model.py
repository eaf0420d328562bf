"""Train a character language model, an LSTM that keeps its state from one piece of text to the next.

`--break`: the state is not cut off from the piece that it comes from; the second backward() goes into the first piece's graph, which is
freed.
"""

import argparse

import torch
from torch import nn

TEXT = """The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. How vexingly quick daft zebras jump!
Sphinx of black quartz, judge my vow. The five boxing wizards jump quickly. Jackdaws love my big sphinx of quartz. """


State = tuple[torch.Tensor, torch.Tensor]


class LanguageModel(nn.Module):
    def __init__(self, characters: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, size)
        self.lstm = nn.LSTM(size, size, batch_first=True)
        self.head = nn.Linear(size, characters)

    def forward(self, text: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        hidden, state = self.lstm(self.embedding(text), state)
        return self.head(hidden), state


def detached(state: State | None) -> State | None:
    return None if state is None else (state[0].detach(), state[1].detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="broken", action="store_true", help="run the program with its bug")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    torch.manual_seed(0)
    alphabet = sorted(set(TEXT))
    numbers = torch.tensor([alphabet.index(character) for character in TEXT])
    length = (len(numbers) - 1) // 4
    inputs, targets = numbers[: 4 * length].view(4, length), numbers[1 : 4 * length + 1].view(4, length)  # four streams side by side
    model = LanguageModel(len(alphabet), 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(1, options.epochs + 1):
        state = None
        for start in range(0, length, 16):
            scores, state = model(inputs[:, start : start + 16], state if options.broken else detached(state))
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets[:, start : start + 16].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
