"""The commands of ``lit-data``, one module each, imported when the command runs.

A wing says in its package which commands it brings: under the names that are used here. One of an installed package,
which the entry point ``lit_data.wings`` names, brings TOOLS and MODULES, and is imported where none of ours is meant.
"""

from lit_data.core.wings import find_tool, list_brought, list_wings

COMMANDS: dict[str, str] = {
    "fit": "train, validate while training, test the best checkpoint, write pictures",
    "validate": "score a checkpoint on the validation split: validate RUN",
    "test": "score a checkpoint on the test split: test RUN",
    "predict": "write what a model finds in every image or volume: predict RUN data.root=FOLDER",
    "prepare": "check all files and decode them ahead of the first run",
    "benchmark": "measure loading and training speed",
    "show": "draw what the model will see",
    "doctor": "examine this machine for causes of slow or failed runs, with remedies",
    **list_brought("COMMANDS"),
}
"""Name of each command and what it does, in the order of ``--help``."""

EVALUATIONS = ("test", "validate")
"""Commands that score a checkpoint, or an exported file."""
SCORING = ("validate", "test", "predict")
"""Commands on a checkpoint, which may be chosen by the folder of its run."""
ON_RUNS = (*list_brought("ON_RUNS"), *SCORING)
"""Those of them that may be given the folder of a run of ``fit``, whose options they take over."""

TOOLS: dict[str, str] = {
    "report": "write one HTML page of a run, of several, or of a sweep: report RUN...",
    "rerun": "start a run again, with changes if any: rerun RUN [key=value ...]",
    "new-kind": "write a package with a kind of data of your own: new-kind NAME",
    **list_brought("TOOLS"),
}
"""The same of commands that have no configuration: each module has `main`, which gets the words that follow."""

MODULES = {
    "validate": "lit_data.app.evaluate",
    "test": "lit_data.app.evaluate",
    **list_brought("MODULES"),
}
"""Modules of commands that do not lie in this package under the name of the command."""


def list_tools() -> dict[str, str]:
    """Return `TOOLS`, and behind them those of installed packages, which are imported for it."""
    tools = dict(TOOLS)
    for wing in list_wings():
        for name, text in getattr(wing, "TOOLS", {}).items():
            tools.setdefault(name, text)
    return tools


def is_tool(command: str) -> bool:
    """Return True for a command without a configuration; installed packages are asked where it is none of ours."""
    if command in COMMANDS or command.startswith("-"):
        return False
    return command in TOOLS or command in list_tools()


def find_module(command: str) -> str:
    """Return the dotted name of the module of a command."""
    if command not in COMMANDS and command not in TOOLS:
        return find_tool(command)
    return MODULES.get(command, f"{__name__}.{command.replace('-', '_')}")
