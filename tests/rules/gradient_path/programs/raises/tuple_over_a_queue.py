# expect: GG302
# names: embedding
import torch
import torch.multiprocessing as mp
from torch import nn

model = nn.Linear(4, 2)


def produce(queue):
    x = torch.randn(3, 4)
    embedding = model(x)
    message = (x, embedding)  # BUG
    queue.put(message)


produce(mp.get_context("fork").SimpleQueue())
