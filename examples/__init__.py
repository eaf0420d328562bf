"""Training programs. `gradguard demo` and the README run the pairs that have a bug and are repaired (`*_fixed.py`); the others are sound
and have a switch, `--break`, that puts in a bug of the kind that people make."""
