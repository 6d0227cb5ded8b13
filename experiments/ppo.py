"""Trains a run, or resumes one: python experiments/ppo.py [--resume NAME | --from CHECKPOINT] [--SETTING VALUE]"""

import sys

from rlx.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
