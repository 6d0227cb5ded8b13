"""A hyperparameter sweep of PPO: python experiments/ppo_sweep.py [--trials N] [--scheduler asha] [--SETTING VALUE]"""

import sys

from rlx.cli.sweep import main

if __name__ == "__main__":
    sys.exit(main())
