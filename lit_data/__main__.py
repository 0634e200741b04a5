"""``python -m lit_data``; Lightning's launcher starts further ranks through this module too."""

from lit_data.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
