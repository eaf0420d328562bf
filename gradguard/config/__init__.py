"""Settings: levels, files, their sources, what a diagnosis does, what is silenced."""
