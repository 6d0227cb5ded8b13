"""rlx: PPO on language models as experiments. See README.md."""

import os

# Read when torch loads its thread pool: threads that wait must not spin on cores that an engine or another worker
# needs; spinning made the same work 20 x slower on 2 cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
