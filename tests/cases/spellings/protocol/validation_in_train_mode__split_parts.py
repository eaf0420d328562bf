import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def volumes(n, contrast):
    label = torch.randint(0, 2, (n,))
    data = torch.randn(n, 1, 4, 8, 8)
    data[label == 1, :, 1:3, 2:6, 2:6] += 1.0
    return TensorDataset(data * contrast, label)
