"""Recognises the kind of an object by its name alone."""

from __future__ import annotations

import re
from functools import lru_cache

from cachesvc.catalog.compiler import split_name
from cachesvc.catalog.containers import BY_EXTENSION, COMPRESSIONS, IDX, Container

ARROW = ("arrow", "feather", "ipc")
PARQUET = ("parquet", "pq", "parq")
TAR = ("tar", "tgz", "tbz2", "txz", "tzst")
"""Extensions of tars, including compressed ones."""
JSON_LINES = ("jsonl", "ndjson", "jsonlines")
CSV = ("csv", "tsv")
TFRECORD = ("tfrecord", "tfrecords", "tfrec")
TABLES = ("csv", "tsv", "jsonl", "ndjson")
"""Extensions of files that may be tables of labels."""
IGNORED = "ignored"
"""Objects beside the data: read-mes, logs, checksums, and the indices and markers of other tools."""
PLAIN = "files"
Kind = str | Container
"""A format's name, a container that is not read, `IGNORED`, or `PLAIN`: a file that may be a sample."""
PLUGIN_IMAGES = frozenset({"avif", "heic", "heif"})
"""Images that only some installations of Pillow read."""
IMAGES = PLUGIN_IMAGES.union(
    ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm"]
)
"""Extensions that the loader decodes as images."""
_VIDEO = frozenset(
    ["mp4", "avi", "mkv", "mov", "webm", "m4v", "mpg", "mpeg", "wmv", "flv", "ts", "3gp", "mjpeg"]
)
_AUDIO = frozenset(
    ["wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "aiff", "aif", "wma", "amr", "sph", "mid"]
)
MEDIA = (IMAGES, _VIDEO, _AUDIO)
"""Extensions of files that hold the same thing in other encodings."""
_SAMPLES = """
    pbm pnm jxl jp2 j2k exr hdr tga svg dng cr2 nef arw ico psd midi
    dcm nii nii.gz nrrd mha mhd svs ndpi edf fits las laz ply pcd obj stl off glb gltf fbx pdb cif mol sdf xyz
    txt json cls xml yaml yml md rst html htm tex srt vtt textgrid pdf docx pptx xlsx odt epub eml
"""
KNOWN = frozenset(_SAMPLES.split()).union(*MEDIA)
"""Extensions of files that are one sample each, of any size."""

_COMPRESSED = ("webdataset", "jsonl", "csv", "tfrecord")
"""Formats whose objects may be compressed by another program."""
_SHARD_NUMBER = re.compile(r"-\d+-of-\d+$")
_CHUNK = re.compile(r"chunk-\d+-\d+(\.[\w:]+)?\.bin")
_IDX = re.compile(r".+[-.]idx\d-(ubyte|byte|short|int|float|double)(\.gz)?")
_IGNORED_NAMES = frozenset(
    {
        *("index.json", "state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"),
        *("features.json", "lock.mdb", "_metadata", "_common_metadata"),
        *("md5sums", "sha1sums", "sha256sums", "sha512sums", "checksums", "manifest"),
        *(
            "md5sums.txt",
            "sha1sums.txt",
            "sha256sums.txt",
            "sha512sums.txt",
            "checksums.txt",
            "manifest.json",
        ),
    }
)
_IGNORED_EXTENSIONS = frozenset({"log", "md5", "sha1", "sha256", "sha512", "crc", "sfv"})
_IGNORED_STEMS = re.compile(
    r"readme([-_.].*)?|licen[cs]e|copying|notice|changelog|changes|contributing|authors|citation"
)
_PROSE = frozenset({"", "md", "markdown", "txt", "rst", "html", "pdf", "bib", "cff"})
_BESIDE_TOKENS = (".ds.index", ".ds.metadata", ".ds.loss")
"""Ends of the names of files that datatrove writes beside its tokens."""
_MARKS = re.compile(r"_(committed|started)_\d+|.*_stats\.json")
"""Marker files of Spark on Databricks and of img2dataset."""


def kind_of(name: str) -> Kind:
    """Return the kind of an object with this name, regardless of case. A `.bin` may hold anything and is plain."""
    name = name.lower()
    stem, extension = split_name(name)
    if _is_ignored(name, stem, extension):
        return IGNORED
    if extension == "bin" and _CHUNK.fullmatch(name):
        return "litdata"
    if _IDX.fullmatch(name):
        return IDX
    if extension not in COMPRESSIONS:
        return _kind(extension)
    inner = split_name(stem)[1]
    if inner == "mds":
        return "mds"
    kind = _kind("jsonl" if inner == "json" else inner)
    return kind if kind in _COMPRESSED or isinstance(kind, Container) else PLAIN


def extension_of(name: str) -> str:
    """Return the last extension in lower case, "" for none or a number (`shard.0001`).

    A compressed file's includes the one before (`jsonl.gz`).
    """
    stem, extension = split_name(name.lower())
    inner = split_name(stem)[1] if extension in COMPRESSIONS else ""
    return f"{inner}.{extension}" if inner else "" if extension.isdigit() else extension


@lru_cache(1024)
def _kind(extension: str) -> Kind:
    extension = _SHARD_NUMBER.sub("", extension)
    if extension in BY_EXTENSION:
        return BY_EXTENSION[extension]
    formats = {"mds": ("mds",), "parquet": PARQUET, "webdataset": TAR, "jsonl": JSON_LINES, "csv": CSV}
    formats |= {
        "arrow": ARROW,
        "tfrecord": TFRECORD,
        "records": ("npy",),
        "tokens": ("ds",),
        IGNORED: ("idx",),
    }
    return next((format for format, extensions in formats.items() if extension in extensions), PLAIN)


def _is_ignored(name: str, stem: str, extension: str) -> bool:
    if extension in _IGNORED_EXTENSIONS or name in _IGNORED_NAMES or name.endswith(_BESIDE_TOKENS):
        return True
    if extension in _PROSE and _IGNORED_STEMS.fullmatch(stem):
        return True
    return (name.startswith("_") and bool(_MARKS.fullmatch(name))) or name.endswith("_stats.json")
