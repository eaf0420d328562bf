"""Shows a diagnosis and knows nothing else."""
