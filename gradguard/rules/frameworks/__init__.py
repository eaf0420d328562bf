"""GG7xx: what goes wrong between PyTorch and the machinery around it: DDP, checkpointing, AMP, torch.compile, Lightning ..."""
