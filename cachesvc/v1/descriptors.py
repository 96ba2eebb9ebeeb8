"""Message classes and service descriptors out of `api.binpb`, with whichever protobuf is installed (5 or newer)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "cachesvc.v1"
FILE = Path(__file__).with_name("api.binpb")
"""A FileDescriptorSet: each file below `proto/`, as protoc compiled it."""

_pool = descriptor_pool.Default()  # where gRPC's reflection looks
for _file in descriptor_pb2.FileDescriptorSet.FromString(FILE.read_bytes()).file:
    _pool.AddSerializedFile(_file.SerializeToString())


def messages(name: str) -> dict[str, Any]:
    """The top-level message classes of one file below `proto/cachesvc/v1`, by their names."""
    found = _pool.FindFileByName(f"cachesvc/v1/{name}").message_types_by_name
    return {each: message_class(descriptor) for each, descriptor in found.items()}


def service_descriptor(name: str) -> Any:
    """The descriptor of a service. Raises KeyError for an unknown name."""
    return _pool.FindServiceByName(f"{PACKAGE}.{name}")


def message_class(descriptor: Any) -> Any:
    """The class of a message that a descriptor names."""
    return message_factory.GetMessageClass(descriptor)
