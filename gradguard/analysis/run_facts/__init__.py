"""Which lines ran."""
