"""Version of the package, beside which nothing is imported."""

VERSION = "0.1.0"
