"""`python -m gradguard`."""

import os
import sys

if __name__ == "__main__" and not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
    # Python has put the working directory first, where the program's own modules may stand; the `gradguard` script's folder has none.
    sys.path[0] = os.path.dirname(sys.executable)

from gradguard.cli.main import main

if __name__ == "__main__":
    main()
