"""Message classes and service descriptors from `api.binpb`, for any installed protobuf from version 5 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "cachesvc.v1"
FILE = Path(__file__).with_name("api.binpb")
"""A FileDescriptorSet of the compiled files below `proto/`."""

_pool = descriptor_pool.Default()  # the pool that gRPC's reflection uses
for _file in descriptor_pb2.FileDescriptorSet.FromString(FILE.read_bytes()).file:
    _pool.AddSerializedFile(_file.SerializeToString())


def messages(name: str) -> dict[str, Any]:
    """The top-level message classes of a file below `proto/cachesvc/v1`, by name. Raises KeyError for an unknown file."""
    found = _pool.FindFileByName(f"cachesvc/v1/{name}").message_types_by_name
    return {each: message_class(descriptor) for each, descriptor in found.items()}


def service_descriptor(name: str) -> Any:
    """The descriptor of a service. Raises KeyError for an unknown name."""
    return _pool.FindServiceByName(f"{PACKAGE}.{name}")


def message_class(descriptor: Any) -> Any:
    """The class for a message descriptor."""
    return message_factory.GetMessageClass(descriptor)
