"""``python -m lit_data``; Lightning's launcher starts further ranks through this module too."""

import faulthandler

from lit_data.cli import main

if __name__ == "__main__":
    # A mapped file that is cut short ends the process: at least the line is printed.
    faulthandler.enable()
    raise SystemExit(main())
