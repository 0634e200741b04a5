"""``python -m lit_data``; Lightning's launcher starts further ranks through this module too."""

from lit_data.core.import_path import leave_current_folder


def start() -> int:
    """Run the command that was typed; return its exit code."""
    leave_current_folder()
    # Behind it, as imports are looked up elsewhere from now on.
    import faulthandler

    from lit_data.app.cli import main

    # A mapped file that is cut short ends the process: at least the line is printed.
    faulthandler.enable()
    return main()


if __name__ == "__main__":
    raise SystemExit(start())
