from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TakeoverHello(_message.Message):
    __slots__ = ("protocol", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class TakeoverOffer(_message.Message):
    __slots__ = ("refused", "version", "state_dir", "datasets", "addresses")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    refused: str
    version: str
    state_dir: str
    datasets: _containers.RepeatedScalarFieldContainer[str]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, refused: _Optional[str] = ..., version: _Optional[str] = ..., state_dir: _Optional[str] = ..., datasets: _Optional[_Iterable[str]] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class TakeoverExtent(_message.Message):
    __slots__ = ("extent", "size_bytes", "digests")
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    extent: bytes
    size_bytes: int
    digests: bytes
    def __init__(self, extent: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., digests: _Optional[bytes] = ...) -> None: ...

class TakeoverReader(_message.Message):
    __slots__ = ("id", "token", "greeted", "welcomed", "dataset", "launch", "knows_holes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    GREETED_FIELD_NUMBER: _ClassVar[int]
    WELCOMED_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    KNOWS_HOLES_FIELD_NUMBER: _ClassVar[int]
    id: int
    token: int
    greeted: bool
    welcomed: bool
    dataset: str
    launch: int
    knows_holes: bool
    def __init__(self, id: _Optional[int] = ..., token: _Optional[int] = ..., greeted: _Optional[bool] = ..., welcomed: _Optional[bool] = ..., dataset: _Optional[str] = ..., launch: _Optional[int] = ..., knows_holes: _Optional[bool] = ...) -> None: ...

class TakeoverLease(_message.Message):
    __slots__ = ("kind", "reader", "extent", "size_bytes", "tier", "request")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LEASED: _ClassVar[TakeoverLease.Kind]
        HELD: _ClassVar[TakeoverLease.Kind]
        DEMANDED: _ClassVar[TakeoverLease.Kind]
    LEASED: TakeoverLease.Kind
    HELD: TakeoverLease.Kind
    DEMANDED: TakeoverLease.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    kind: TakeoverLease.Kind
    reader: int
    extent: bytes
    size_bytes: int
    tier: str
    request: int
    def __init__(self, kind: _Optional[_Union[TakeoverLease.Kind, str]] = ..., reader: _Optional[int] = ..., extent: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., tier: _Optional[str] = ..., request: _Optional[int] = ...) -> None: ...

class TakeoverPlan(_message.Message):
    __slots__ = ("reader", "extents", "first_steps", "last_steps", "following", "passed")
    READER_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEPS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    reader: int
    extents: _containers.RepeatedScalarFieldContainer[int]
    first_steps: _containers.RepeatedScalarFieldContainer[int]
    last_steps: _containers.RepeatedScalarFieldContainer[int]
    following: _containers.RepeatedScalarFieldContainer[int]
    passed: int
    def __init__(self, reader: _Optional[int] = ..., extents: _Optional[_Iterable[int]] = ..., first_steps: _Optional[_Iterable[int]] = ..., last_steps: _Optional[_Iterable[int]] = ..., following: _Optional[_Iterable[int]] = ..., passed: _Optional[int] = ...) -> None: ...

class TakeoverDirectory(_message.Message):
    __slots__ = ("path", "lost", "locks")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    path: str
    lost: bool
    locks: int
    def __init__(self, path: _Optional[str] = ..., lost: _Optional[bool] = ..., locks: _Optional[int] = ...) -> None: ...

class TakeoverState(_message.Message):
    __slots__ = ("extents", "readers", "leases", "plans", "next_id", "locks", "mounted", "directories")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    MOUNTED_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[TakeoverExtent]
    readers: _containers.RepeatedCompositeFieldContainer[TakeoverReader]
    leases: _containers.RepeatedCompositeFieldContainer[TakeoverLease]
    plans: _containers.RepeatedCompositeFieldContainer[TakeoverPlan]
    next_id: int
    locks: int
    mounted: _containers.RepeatedScalarFieldContainer[str]
    directories: _containers.RepeatedCompositeFieldContainer[TakeoverDirectory]
    def __init__(self, extents: _Optional[_Iterable[_Union[TakeoverExtent, _Mapping]]] = ..., readers: _Optional[_Iterable[_Union[TakeoverReader, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[TakeoverLease, _Mapping]]] = ..., plans: _Optional[_Iterable[_Union[TakeoverPlan, _Mapping]]] = ..., next_id: _Optional[int] = ..., locks: _Optional[int] = ..., mounted: _Optional[_Iterable[str]] = ..., directories: _Optional[_Iterable[_Union[TakeoverDirectory, _Mapping]]] = ...) -> None: ...
