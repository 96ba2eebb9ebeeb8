"""The messages of `proto/cachesvc/v1/takeover.proto`; the stub file beside this module has their types."""

from cachesvc.v1.descriptors import messages

globals().update(messages("takeover.proto"))
