"""The gRPC API's messages and services, built at run time from the descriptors that `make proto` writes.

In: the files below `proto/`, compiled to `api.binpb`. Out: message classes, client stubs and server handlers. Unlike
modules that protoc generates, descriptors work with several major versions of protobuf and gRPC.
"""
