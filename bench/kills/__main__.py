"""python -m bench.kills [KILLS] [SEED]: see `command.py`."""

import sys

if __name__ == "__main__":  # every trainer imports this module under another name, at no cost
    from bench.kills.command import main

    sys.exit(main(sys.argv[1:]))
