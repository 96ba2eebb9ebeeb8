"""Client stubs and server handlers of the services in the descriptors."""

from __future__ import annotations

from typing import Any

import grpc

from cachesvc.v1.descriptors import message_class, service_descriptor


class Stub:
    """A service's methods as attributes, callable on a channel: `Stub(channel, "Cache").Status(request)`."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        found = service_descriptor(name)
        for method in found.methods:
            call = channel.unary_stream if method.server_streaming else channel.unary_unary
            request, reply = message_class(method.input_type), message_class(method.output_type)
            bound = call(
                f"/{found.full_name}/{method.name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            setattr(self, method.name, bound)

    def __getattr__(self, method: str) -> Any:  # tells type checkers that methods are attributes
        raise AttributeError(f"the service has no method {method}")


def add_to_server(server: grpc.Server, name: str, servicer: object) -> None:
    """Register `servicer` for a service. gRPC answers UNIMPLEMENTED for methods that the servicer lacks."""
    found, handlers = service_descriptor(name), {}
    for method in found.methods:
        answer = getattr(servicer, method.name, None)
        if answer is not None:
            handler = (
                grpc.unary_stream_rpc_method_handler
                if method.server_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            request, reply = message_class(method.input_type), message_class(method.output_type)
            handlers[method.name] = handler(
                answer, request_deserializer=request.FromString, response_serializer=reply.SerializeToString
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(found.full_name, handlers),))
