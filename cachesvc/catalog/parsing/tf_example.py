"""Parses `tf.train.Example` by protobuf, without TensorFlow. Compilers and loaders share it.

The messages are those of https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto, in a
package and a pool of our own, so that a process may import TensorFlow too.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

_FILE = """
name: "cachesvc/example.proto" package: "cachesvc.example" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "BytesList" oneof_index: 0 }
  field { name: "float32" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "FloatList" oneof_index: 0 }
  field { name: "int64" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Feature" }
  }
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Features.FeatureEntry"
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Features" }
  field { name: "feature_lists" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
}
"""
"""`feature_lists` is the second field of a SequenceExample, which an Example would take for unknown bytes."""

BYTES, FLOAT, INT = KINDS = ("bytes", "float32", "int64")


def _example() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_FILE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("cachesvc.example.Example"))


_Example = _example()
Features = dict[str, tuple[str, Any]]
"""The kind, one of `KINDS` or "" for a feature without values, and the values of each feature."""


def features_of(record: bytes) -> Features:
    """Return the features of an Example. Raises ValueError for other bytes, and for a SequenceExample."""
    try:
        example = _Example.FromString(record)
    except DecodeError as error:
        raise ValueError(f"it is no tf.train.Example: {error}") from None
    if example.feature_lists:
        raise ValueError("it is a tf.train.SequenceExample")
    features: Features = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else ()
        features[name] = (kind if values else "", values)
    return features
