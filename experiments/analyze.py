"""A sweep's results from MLflow as a page, tables and figures: python experiments/analyze.py [--sweep NAME]"""

import sys

from rlx.cli.analyze import main

if __name__ == "__main__":
    sys.exit(main())
