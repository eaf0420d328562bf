"""Small training programs: each with a bug, and repaired (`*_fixed.py`). `gradguard demo` and the README run them."""
