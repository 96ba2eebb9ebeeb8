"""The gRPC API's messages and services, built at run time from the descriptors that `make proto` writes.

In: the files below `proto/`, compiled to `api.binpb`. Out: message classes, client stubs, and what adds a servicer to a
server. Modules that protoc generates are tied to one major version of protobuf and to a recent gRPC; descriptors are not.
"""
