"""Probes: each watches one kind of happening and writes facts into the journal."""
