"""The folder of `builtin:tiny`; see README.md beside this file."""
