"""Names that are never data: hidden files, and files that operating systems, file servers and tools leave beside data."""

from __future__ import annotations

_FOLDERS = frozenset(
    {
        "lost+found",
        "__macosx",
        "__pycache__",
        "@eadir",
        "#recycle",
        "@recycle",
        "#snapshot",
        "$recycle.bin",
        "system volume information",
    }
)
_FILES = frozenset({"", "_success", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
"""The empty name is a bucket's folder marker."""


def is_ignored_folder(name: str) -> bool:
    """Tell whether nothing below a folder of this name is data. Names are compared without case."""
    return name.startswith(".") or name.lower() in _FOLDERS


def is_ignored(path: str) -> bool:
    """Tell whether a path below a dataset's URI is not part of the dataset."""
    *folders, name = path.split("/")
    return name.startswith(".") or name.lower() in _FILES or any(map(is_ignored_folder, folders))
