"""The rules: a folder a family, a file a rule. See `gradguard.rules.base` for what a rule is."""
