import torch
from torch import nn

torch.manual_seed(0)
words = ["<pad>", "the", "cat", "sat", "mat"]
numbers = {word: number for number, word in enumerate(words)}
embedding = nn.Embedding(len(words), 8)
sentence = torch.tensor([numbers[word] for word in "the cat sat the mat".split()])
embedding(sentence).pow(2).mean().backward()
