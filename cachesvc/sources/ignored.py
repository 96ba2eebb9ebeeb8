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
        "_temporary",
    }
)
_MANIFESTS = frozenset({".hoodie"})
"""Hidden folders that say which of the files beside them count."""
_FILES = frozenset({"", "_success", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
"""The empty name is a bucket's folder marker."""
_MARKERS = frozenset({"", "_success"})


def is_ignored_folder(name: str) -> bool:
    """Tell whether nothing below a folder of this name is data. Names are compared without case."""
    return name.startswith(".") or name.lower() in _FOLDERS


def is_litter_folder(name: str) -> bool:
    """Tell whether a folder of this name belongs to an operating system, file server or tool."""
    return name.lower() in _FOLDERS


def is_named_folder(name: str) -> bool:
    """Tell whether a folder of this name is listed without what is in it."""
    return is_litter_folder(name) or name in _MANIFESTS


def litter_name(path: str) -> str:
    """Return the name because of which a path is ignored, with a slash for a folder; "" for hidden files and markers."""
    *folders, name = path.split("/")
    found = next(filter(is_litter_folder, folders), "")
    if found:
        return f"{found}/"
    return name if name.lower() in _FILES - _MARKERS else ""


def is_ignored(path: str) -> bool:
    """Tell whether a path below a dataset's URI is not part of the dataset."""
    *folders, name = path.split("/")
    return name.startswith(".") or name.lower() in _FILES or any(map(is_ignored_folder, folders))
