"""The `gradguard` command."""
