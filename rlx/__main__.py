"""The command `rlx`, as `python -m rlx`."""

from rlx.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
