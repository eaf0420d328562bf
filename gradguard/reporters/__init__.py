"""Reporters: they show a diagnosis and know nothing else.

`terminal` for people, `jsonl` for machines, `html` for a page, `notebook` for a cell. Nothing is imported here: a run that never
fails needs none of them.
"""
