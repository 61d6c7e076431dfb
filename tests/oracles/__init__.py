"""Independent implementations that the package is compared with (scalar.py imports nothing from it)."""
