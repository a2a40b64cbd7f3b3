"""``python -m hybridlab``."""

from hybridlab.cli import main

if __name__ == "__main__":
    main()
