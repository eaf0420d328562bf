import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(0)
config = DistilBertConfig(vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=16, num_labels=2)
model = DistilBertForSequenceClassification(config)
words, labels = torch.randint(0, 20, (4, 6)), torch.tensor([0, 1, 1, 0])
output = model(input_ids=words)
output.loss.backward()
