"""Version of the package, which can be imported without other modules."""

VERSION = "0.1.0"
