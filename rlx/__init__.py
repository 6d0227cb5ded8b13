"""rlx: PPO on language models as experiments. See README.md."""

import os

__version__ = "0.2.0"

# What torch and Ray read when they are imported, so before anything here imports them.
# Threads that wait must not spin on cores that an engine or another worker needs: it made the same work 20 x slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Many small actors on few cores are the plan of a run on a laptop, no reason for a warning; of an engine or a worker
# that died, the run itself tells in a line.
_OURS_TO_TELL = "worker processes have been started on node|A worker died or was killed|Task VLLMEngine[.]"
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _OURS_TO_TELL)
