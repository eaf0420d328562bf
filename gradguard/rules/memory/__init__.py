"""GG8xx: memory that runs out, and memory that grows."""
