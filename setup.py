"""Lists the packages of each top folder under the `mstar.` prefix, so that a new subpackage is never left out."""

from setuptools import find_packages, setup

FOLDERS = ("daemon", "ranks", "loader", "arch", "kernels", "scripts")

setup(
    packages=[f"mstar.{folder}" for folder in FOLDERS]
    + [f"mstar.{folder}.{package}" for folder in FOLDERS for package in find_packages(folder)],
    package_data={
        "": ["py.typed", "*.c", "*.h", "*.json", "*.safetensors", "*.md", "*.jinja"],
        "mstar.kernels": ["tables/*/*/*.json"],  # folders named after devices, not packages
    },
)
