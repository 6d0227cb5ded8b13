"""The runs of a storage, or one run's checkpoints: python experiments/checkpoints.py [RUN] [--storage ADDRESS]"""

import sys

from rlx.cli.listing import main

if __name__ == "__main__":
    sys.exit(main())
