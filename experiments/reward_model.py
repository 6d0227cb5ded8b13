"""Train a reward model on preferences: python experiments/reward_model.py [--pairs FILE.jsonl] [--out FOLDER] ..."""

import sys

from rlx.cli.reward_model import main

if __name__ == "__main__":
    sys.exit(main())
