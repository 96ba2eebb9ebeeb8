"""The messages of `proto/cachesvc/v1/cachesvc.proto`; the stub file beside this module has their types."""

from cachesvc.v1.descriptors import messages

globals().update(messages("cachesvc.proto"))
