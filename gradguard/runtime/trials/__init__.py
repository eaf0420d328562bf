"""Trials: the program run again, in a process and a folder of its own, with a fix in its files.

`verify` has the search, `trial` starts a process and reads what came of it, `mirror` copies the program's files, and in the new process
`confinement` keeps what it does apart and `observer` looks at its steps. What an outcome proves is `gradguard.fixes.verification`'s.
"""
