"""Nets and modules that find boxes."""
