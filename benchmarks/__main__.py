"""``python -m benchmarks SUITE [overrides]``: measure a suite, from the repository's folder."""

import sys
from pathlib import Path

from lit_data.app.cli import main
from lit_data.core.errors import ConfigError

_CONF = Path(__file__).parent / "conf"


def run(words: list[str]) -> int:
    """Run ``lit_data benchmark`` with a suite.

    Args:
        words: Name of a suite, then overrides; options of the suite are ``suite.NAME=VALUE``.

    Returns:
        The exit code.
    """
    suites = sorted(path.stem for path in (_CONF / "suite").glob("*.yaml"))
    if not words or words[0] not in suites:
        print(
            f"usage: python -m benchmarks SUITE [overrides]; suites: {', '.join(suites)}",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    package = ["--config-dir", str(_CONF), "--package", __package__ or "benchmarks"]
    return main(["benchmark", *package, f"+suite={words[0]}", *words[1:]])


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
