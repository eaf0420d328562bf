"""Trials: the program run again, in a process and a folder of its own, with a fix in its files.

`verify` has the search, `trial` starts a process and reads what came of it, `mirror` copies the program's files, and in the new process
`confinement` keeps what it does apart and `observer` looks at its steps. What an outcome proves is `gradguard.fixes.verification`'s.

Why a new process, and not a fork of the one in which the step failed, which has torch imported and stands at the step already:

- A step's beginning is gone when it fails. Buffers, gradients, iterators and Python state have moved on, and to keep a copy of them all
  would cost every step of every training. `gradguard.runtime.rerun` puts back what its own second run changes, not what the first did:
  enough to see which line it is, not to prove that a repaired step trains.
- A fix is verified over the steps after the one that failed. Their loop is in the caller's frames, so that the fork would have to go on
  with the program, on files, sockets and pipes that it shares with its parent down to their positions: Landlock and audit hooks see what
  is opened, not what was open before.
- Threads do not survive a fork. Where torch has computed with more than one thread, as it does by default, the first parallel operation
  of the child waits for ever; with one thread, sums are rounded otherwise than in the run that failed.
- Half of the patches change what ran before the step: constructors, optimizers, the order of statements of the module. Only code that
  is called again could be exchanged in a live process.

What a fork would save is the import of torch, about two seconds, and the way to the failing step, which `Order.seconds` bounds.
"""
