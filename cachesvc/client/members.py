"""The control API of another member of the cluster, by way of this node's daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class MemberStub:
    """The methods of `Cache` as attributes, like those of the stub that it wraps. The daemon of that stub passes each call
    on to a member, given by name or address."""

    def __init__(self, stub: Any, node: str) -> None:
        from cachesvc.v1 import cachesvc_pb2
        from cachesvc.v1.descriptors import message_class, service_descriptor

        self._stub, self._node, self._call = stub, node, cachesvc_pb2.NodeCall
        self._methods = {each.name: each for each in service_descriptor("Cache").methods}
        self._class_of = message_class

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self._methods[name]
        reply = self._class_of(method.output_type)

        def ask(request: Any, **options: Any) -> Any:
            call = self._call(node=self._node, method=name, request=request.SerializeToString())
            answers = _Answers(self._stub.OnNode(call, **options), reply.FromString)
            return answers if method.server_streaming else next(iter(answers))

        return ask


class _Answers:
    """The messages of one call. `cancel` ends it."""

    def __init__(self, call: Any, parse: Callable[[bytes], Any]) -> None:
        self.cancel, self._call, self._parse = call.cancel, call, parse

    def __iter__(self) -> Iterator[Any]:
        return (self._parse(each.reply) for each in self._call)
