"""Monitors follow what lasts from step to step and report what needs a rule's judgement."""
