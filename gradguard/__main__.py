"""`python -m gradguard`."""

from gradguard.cli import main

if __name__ == "__main__":
    main()
