"""A checkpoint's policy for transformers and vLLM: python experiments/export.py RUN [--checkpoint best] [--out DIR]"""

import sys

from rlx.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
