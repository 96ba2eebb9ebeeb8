from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DatasetOptions(_message.Message):
    __slots__ = ("format", "extent_bytes", "dtype", "seq_len", "overlap", "record_bytes", "labels", "header_bytes", "fields", "on_error", "split", "separator")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ON_ERROR_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    SEPARATOR_FIELD_NUMBER: _ClassVar[int]
    format: str
    extent_bytes: int
    dtype: str
    seq_len: int
    overlap: int
    record_bytes: int
    labels: str
    header_bytes: int
    fields: str
    on_error: str
    split: str
    separator: str
    def __init__(self, format: _Optional[str] = ..., extent_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., seq_len: _Optional[int] = ..., overlap: _Optional[int] = ..., record_bytes: _Optional[int] = ..., labels: _Optional[str] = ..., header_bytes: _Optional[int] = ..., fields: _Optional[str] = ..., on_error: _Optional[str] = ..., split: _Optional[str] = ..., separator: _Optional[str] = ...) -> None: ...

class Dataset(_message.Message):
    __slots__ = ("id", "uri", "format", "samples", "extents", "size_bytes", "stored_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    uri: str
    format: str
    samples: int
    extents: int
    size_bytes: int
    stored_bytes: int
    def __init__(self, id: _Optional[str] = ..., uri: _Optional[str] = ..., format: _Optional[str] = ..., samples: _Optional[int] = ..., extents: _Optional[int] = ..., size_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class OpenDatasetRequest(_message.Message):
    __slots__ = ("uris", "options", "version", "refresh")
    URIS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFRESH_FIELD_NUMBER: _ClassVar[int]
    uris: _containers.RepeatedScalarFieldContainer[str]
    options: DatasetOptions
    version: str
    refresh: bool
    def __init__(self, uris: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[DatasetOptions, _Mapping]] = ..., version: _Optional[str] = ..., refresh: _Optional[bool] = ...) -> None: ...

class OpenDatasetReply(_message.Message):
    __slots__ = ("indexed_bytes", "total_bytes", "dataset", "notes", "stale", "kept", "sharing")
    INDEXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    indexed_bytes: int
    total_bytes: int
    dataset: Dataset
    notes: _containers.RepeatedScalarFieldContainer[str]
    stale: str
    kept: _containers.RepeatedScalarFieldContainer[str]
    sharing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, indexed_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., dataset: _Optional[_Union[Dataset, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., stale: _Optional[str] = ..., kept: _Optional[_Iterable[str]] = ..., sharing: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenPreparedRequest(_message.Message):
    __slots__ = ("source", "name", "digest", "given_name", "spec", "form", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GIVEN_NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    source: str
    name: str
    digest: str
    given_name: str
    spec: str
    form: str
    versions: _containers.ScalarMap[str, str]
    def __init__(self, source: _Optional[str] = ..., name: _Optional[str] = ..., digest: _Optional[str] = ..., given_name: _Optional[str] = ..., spec: _Optional[str] = ..., form: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class OpenPreparedReply(_message.Message):
    __slots__ = ("dataset", "digest", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DATASET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    digest: str
    versions: _containers.ScalarMap[str, str]
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., digest: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("dataset", "dry_run")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    dry_run: bool
    def __init__(self, dataset: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("extents", "resident_extents", "size_bytes", "resident_bytes", "source_bytes", "unfit_bytes", "failures", "done", "peer_bytes", "over_quota_bytes", "lost_tiers", "full_tiers", "cluster_extents", "cluster_bytes")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNFIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVER_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_TIERS_FIELD_NUMBER: _ClassVar[int]
    FULL_TIERS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    extents: int
    resident_extents: int
    size_bytes: int
    resident_bytes: int
    source_bytes: int
    unfit_bytes: int
    failures: _containers.RepeatedCompositeFieldContainer[ExtentFailure]
    done: bool
    peer_bytes: int
    over_quota_bytes: int
    lost_tiers: _containers.RepeatedScalarFieldContainer[str]
    full_tiers: _containers.RepeatedScalarFieldContainer[str]
    cluster_extents: int
    cluster_bytes: int
    def __init__(self, extents: _Optional[int] = ..., resident_extents: _Optional[int] = ..., size_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., source_bytes: _Optional[int] = ..., unfit_bytes: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[ExtentFailure, _Mapping]]] = ..., done: _Optional[bool] = ..., peer_bytes: _Optional[int] = ..., over_quota_bytes: _Optional[int] = ..., lost_tiers: _Optional[_Iterable[str]] = ..., full_tiers: _Optional[_Iterable[str]] = ..., cluster_extents: _Optional[int] = ..., cluster_bytes: _Optional[int] = ...) -> None: ...

class ExtentFailure(_message.Message):
    __slots__ = ("extent", "message", "code")
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    extent: str
    message: str
    code: int
    def __init__(self, extent: _Optional[str] = ..., message: _Optional[str] = ..., code: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("since", "follow")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    since: float
    follow: bool
    def __init__(self, since: _Optional[float] = ..., follow: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "time", "uid", "pid", "job", "uri", "dataset", "extent", "tier", "node", "size_bytes", "extents", "error", "why", "left_out", "words")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    time: float
    uid: int
    pid: int
    job: str
    uri: str
    dataset: str
    extent: str
    tier: str
    node: str
    size_bytes: int
    extents: int
    error: str
    why: str
    left_out: int
    words: str
    def __init__(self, kind: _Optional[str] = ..., time: _Optional[float] = ..., uid: _Optional[int] = ..., pid: _Optional[int] = ..., job: _Optional[str] = ..., uri: _Optional[str] = ..., dataset: _Optional[str] = ..., extent: _Optional[str] = ..., tier: _Optional[str] = ..., node: _Optional[str] = ..., size_bytes: _Optional[int] = ..., extents: _Optional[int] = ..., error: _Optional[str] = ..., why: _Optional[str] = ..., left_out: _Optional[int] = ..., words: _Optional[str] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadReply(_message.Message):
    __slots__ = ("taken", "waiting")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    taken: _containers.RepeatedScalarFieldContainer[str]
    waiting: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, taken: _Optional[_Iterable[str]] = ..., waiting: _Optional[_Iterable[str]] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finding(_message.Message):
    __slots__ = ("check", "level", "text", "mend")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MEND_FIELD_NUMBER: _ClassVar[int]
    check: str
    level: str
    text: str
    mend: str
    def __init__(self, check: _Optional[str] = ..., level: _Optional[str] = ..., text: _Optional[str] = ..., mend: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "budget_bytes", "used_bytes", "held_bytes", "lost", "corrupt_extents", "scrubbed_bytes", "full", "stalled", "granted_bytes", "unplanned_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNPLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    budget_bytes: int
    used_bytes: int
    held_bytes: int
    lost: bool
    corrupt_extents: int
    scrubbed_bytes: int
    full: bool
    stalled: bool
    granted_bytes: int
    unplanned_bytes: int
    def __init__(self, name: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., lost: _Optional[bool] = ..., corrupt_extents: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., full: _Optional[bool] = ..., stalled: _Optional[bool] = ..., granted_bytes: _Optional[int] = ..., unplanned_bytes: _Optional[int] = ...) -> None: ...

class DatasetStatus(_message.Message):
    __slots__ = ("dataset", "resident_bytes", "resident_extents", "readers", "pinned", "hits", "ahead", "misses", "refused", "source_bytes", "bound", "kept_bytes", "peer_bytes", "epochs", "listed_at", "hit_rate", "residency", "hit_rates", "bounds")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LISTED_AT_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    HIT_RATES_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    resident_bytes: int
    resident_extents: int
    readers: int
    pinned: bool
    hits: int
    ahead: int
    misses: int
    refused: int
    source_bytes: int
    bound: float
    kept_bytes: int
    peer_bytes: int
    epochs: _containers.RepeatedCompositeFieldContainer[EpochStatus]
    listed_at: int
    hit_rate: float
    residency: Residency
    hit_rates: _containers.RepeatedScalarFieldContainer[float]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., resident_bytes: _Optional[int] = ..., resident_extents: _Optional[int] = ..., readers: _Optional[int] = ..., pinned: _Optional[bool] = ..., hits: _Optional[int] = ..., ahead: _Optional[int] = ..., misses: _Optional[int] = ..., refused: _Optional[int] = ..., source_bytes: _Optional[int] = ..., bound: _Optional[float] = ..., kept_bytes: _Optional[int] = ..., peer_bytes: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[EpochStatus, _Mapping]]] = ..., listed_at: _Optional[int] = ..., hit_rate: _Optional[float] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ..., hit_rates: _Optional[_Iterable[float]] = ..., bounds: _Optional[_Iterable[float]] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("ram", "nvme", "filling")
    RAM_FIELD_NUMBER: _ClassVar[int]
    NVME_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    ram: _containers.RepeatedScalarFieldContainer[int]
    nvme: _containers.RepeatedScalarFieldContainer[int]
    filling: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ram: _Optional[_Iterable[int]] = ..., nvme: _Optional[_Iterable[int]] = ..., filling: _Optional[_Iterable[int]] = ...) -> None: ...

class EpochStatus(_message.Message):
    __slots__ = ("number", "touched", "hits", "hit_rate", "bound", "of_bound")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    OF_BOUND_FIELD_NUMBER: _ClassVar[int]
    number: int
    touched: int
    hits: int
    hit_rate: float
    bound: float
    of_bound: float
    def __init__(self, number: _Optional[int] = ..., touched: _Optional[int] = ..., hits: _Optional[int] = ..., hit_rate: _Optional[float] = ..., bound: _Optional[float] = ..., of_bound: _Optional[float] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "pid", "uptime_s", "tiers", "datasets", "readers", "fills_running", "allow", "sources", "cluster", "now_s", "node", "throughput", "history", "jobs", "fills", "nodes", "events", "bypassed", "others")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    FILLS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BYPASSED_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    pid: int
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetStatus]
    readers: int
    fills_running: int
    allow: _containers.RepeatedScalarFieldContainer[str]
    sources: SourceStatus
    cluster: ClusterStatus
    now_s: float
    node: str
    throughput: Throughput
    history: History
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    fills: _containers.RepeatedCompositeFieldContainer[FillStatus]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    bypassed: bool
    others: OtherDatasets
    def __init__(self, version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., datasets: _Optional[_Iterable[_Union[DatasetStatus, _Mapping]]] = ..., readers: _Optional[int] = ..., fills_running: _Optional[int] = ..., allow: _Optional[_Iterable[str]] = ..., sources: _Optional[_Union[SourceStatus, _Mapping]] = ..., cluster: _Optional[_Union[ClusterStatus, _Mapping]] = ..., now_s: _Optional[float] = ..., node: _Optional[str] = ..., throughput: _Optional[_Union[Throughput, _Mapping]] = ..., history: _Optional[_Union[History, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., fills: _Optional[_Iterable[_Union[FillStatus, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., bypassed: _Optional[bool] = ..., others: _Optional[_Union[OtherDatasets, _Mapping]] = ...) -> None: ...

class Throughput(_message.Message):
    __slots__ = ("source", "peers", "ram", "nvme")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RAM_FIELD_NUMBER: _ClassVar[int]
    NVME_FIELD_NUMBER: _ClassVar[int]
    source: float
    peers: float
    ram: float
    nvme: float
    def __init__(self, source: _Optional[float] = ..., peers: _Optional[float] = ..., ram: _Optional[float] = ..., nvme: _Optional[float] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("step_s", "source", "peers", "ram", "nvme")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RAM_FIELD_NUMBER: _ClassVar[int]
    NVME_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    source: _containers.RepeatedScalarFieldContainer[float]
    peers: _containers.RepeatedScalarFieldContainer[float]
    ram: _containers.RepeatedScalarFieldContainer[float]
    nvme: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step_s: _Optional[float] = ..., source: _Optional[_Iterable[float]] = ..., peers: _Optional[_Iterable[float]] = ..., ram: _Optional[_Iterable[float]] = ..., nvme: _Optional[_Iterable[float]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("id", "user", "readers_connected", "batches_per_s", "waiting", "waits_for", "readers")
    ID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    READERS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    user: str
    readers_connected: int
    batches_per_s: float
    waiting: float
    waits_for: str
    readers: _containers.RepeatedCompositeFieldContainer[ReaderStatus]
    def __init__(self, id: _Optional[str] = ..., user: _Optional[str] = ..., readers_connected: _Optional[int] = ..., batches_per_s: _Optional[float] = ..., waiting: _Optional[float] = ..., waits_for: _Optional[str] = ..., readers: _Optional[_Iterable[_Union[ReaderStatus, _Mapping]]] = ...) -> None: ...

class ReaderStatus(_message.Message):
    __slots__ = ("number", "pid", "dataset", "step", "steps", "leased_extents", "waiting_extents", "waiting_s", "waits_for", "batches_per_s", "waits")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LEASED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    BATCHES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    number: int
    pid: int
    dataset: str
    step: int
    steps: int
    leased_extents: int
    waiting_extents: int
    waiting_s: float
    waits_for: str
    batches_per_s: float
    waits: _containers.RepeatedCompositeFieldContainer[WaitShare]
    def __init__(self, number: _Optional[int] = ..., pid: _Optional[int] = ..., dataset: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., leased_extents: _Optional[int] = ..., waiting_extents: _Optional[int] = ..., waiting_s: _Optional[float] = ..., waits_for: _Optional[str] = ..., batches_per_s: _Optional[float] = ..., waits: _Optional[_Iterable[_Union[WaitShare, _Mapping]]] = ...) -> None: ...

class WaitShare(_message.Message):
    __slots__ = ("cause", "share")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    share: float
    def __init__(self, cause: _Optional[str] = ..., share: _Optional[float] = ...) -> None: ...

class FillStatus(_message.Message):
    __slots__ = ("dataset", "extent", "size_bytes", "tier", "reads", "age_s")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    extent: int
    size_bytes: int
    tier: str
    reads: str
    age_s: float
    def __init__(self, dataset: _Optional[str] = ..., extent: _Optional[int] = ..., size_bytes: _Optional[int] = ..., tier: _Optional[str] = ..., reads: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class OtherDatasets(_message.Message):
    __slots__ = ("datasets", "size_bytes", "resident_bytes", "readers", "source_bytes")
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    datasets: int
    size_bytes: int
    resident_bytes: int
    readers: int
    source_bytes: int
    def __init__(self, datasets: _Optional[int] = ..., size_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., readers: _Optional[int] = ..., source_bytes: _Optional[int] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("present", "away", "received_bytes", "sent_bytes", "left", "list_read", "warnings")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LIST_READ_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    present: int
    away: int
    received_bytes: int
    sent_bytes: int
    left: int
    list_read: bool
    warnings: _containers.RepeatedCompositeFieldContainer[ClusterWarning]
    def __init__(self, present: _Optional[int] = ..., away: _Optional[int] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., left: _Optional[int] = ..., list_read: _Optional[bool] = ..., warnings: _Optional[_Iterable[_Union[ClusterWarning, _Mapping]]] = ...) -> None: ...

class SourceStatus(_message.Message):
    __slots__ = ("requests", "bytes", "retries", "throttled", "hedges", "hedge_wins", "hedge_bytes")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_FIELD_NUMBER: _ClassVar[int]
    HEDGES_FIELD_NUMBER: _ClassVar[int]
    HEDGE_WINS_FIELD_NUMBER: _ClassVar[int]
    HEDGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    requests: int
    bytes: int
    retries: int
    throttled: int
    hedges: int
    hedge_wins: int
    hedge_bytes: int
    def __init__(self, requests: _Optional[int] = ..., bytes: _Optional[int] = ..., retries: _Optional[int] = ..., throttled: _Optional[int] = ..., hedges: _Optional[int] = ..., hedge_wins: _Optional[int] = ..., hedge_bytes: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("datasets",)
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetStatus]
    def __init__(self, datasets: _Optional[_Iterable[_Union[DatasetStatus, _Mapping]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("dataset", "pinned")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    pinned: bool
    def __init__(self, dataset: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("dataset",)
    DATASET_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("evicted_bytes", "busy_bytes", "lost_bytes")
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    evicted_bytes: int
    busy_bytes: int
    lost_bytes: int
    def __init__(self, evicted_bytes: _Optional[int] = ..., busy_bytes: _Optional[int] = ..., lost_bytes: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("dataset",)
    DATASET_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("checked_extents", "extents", "corrupt_extents", "done")
    CHECKED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    checked_extents: int
    extents: int
    corrupt_extents: int
    done: bool
    def __init__(self, checked_extents: _Optional[int] = ..., extents: _Optional[int] = ..., corrupt_extents: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "name", "instance", "leaving")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    instance: str
    leaving: bool
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., instance: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("protocol", "node")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "name", "instance", "weight_bytes", "zone", "release", "extents", "extent_bytes", "domain", "allow", "blocks", "source", "certificate_ends", "free_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    instance: str
    weight_bytes: int
    zone: str
    release: str
    extents: int
    extent_bytes: int
    domain: str
    allow: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    source: str
    certificate_ends: int
    free_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., instance: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., zone: _Optional[str] = ..., release: _Optional[str] = ..., extents: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., domain: _Optional[str] = ..., allow: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ..., source: _Optional[str] = ..., certificate_ends: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class ExtentQuestion(_message.Message):
    __slots__ = ("extent", "failed", "late", "left_out")
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    extent: bytes
    failed: _containers.RepeatedScalarFieldContainer[str]
    late: _containers.RepeatedScalarFieldContainer[str]
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, extent: _Optional[bytes] = ..., failed: _Optional[_Iterable[str]] = ..., late: _Optional[_Iterable[str]] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("protocol", "node", "questions", "peek", "keep")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    questions: _containers.RepeatedCompositeFieldContainer[ExtentQuestion]
    peek: bool
    keep: bool
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., questions: _Optional[_Iterable[_Union[ExtentQuestion, _Mapping]]] = ..., peek: _Optional[bool] = ..., keep: _Optional[bool] = ...) -> None: ...

class ExtentPlace(_message.Message):
    __slots__ = ("node", "filling", "generation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FILLING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    filling: bool
    generation: int
    def __init__(self, node: _Optional[str] = ..., filling: _Optional[bool] = ..., generation: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("places", "young")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    YOUNG_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[ExtentPlace]
    young: bool
    def __init__(self, places: _Optional[_Iterable[_Union[ExtentPlace, _Mapping]]] = ..., young: _Optional[bool] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("protocol", "node", "filled", "dropped", "progressing", "anew", "wrong", "differing")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PROGRESSING_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    filled: bytes
    dropped: bytes
    progressing: bytes
    anew: bool
    wrong: bytes
    differing: bytes
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., filled: _Optional[bytes] = ..., dropped: _Optional[bytes] = ..., progressing: _Optional[bytes] = ..., anew: _Optional[bool] = ..., wrong: _Optional[bytes] = ..., differing: _Optional[bytes] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("protocol", "extents")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    extents: bytes
    def __init__(self, protocol: _Optional[int] = ..., extents: _Optional[bytes] = ...) -> None: ...

class HeldReply(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    def __init__(self, held: _Optional[bytes] = ...) -> None: ...

class BypassRequest(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: _Optional[bool] = ...) -> None: ...

class BypassReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhereRequest(_message.Message):
    __slots__ = ("dataset",)
    DATASET_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    def __init__(self, dataset: _Optional[str] = ...) -> None: ...

class WhereReply(_message.Message):
    __slots__ = ("dataset", "nodes")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    dataset: Dataset
    nodes: _containers.RepeatedCompositeFieldContainer[NodeHolding]
    def __init__(self, dataset: _Optional[_Union[Dataset, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeHolding, _Mapping]]] = ...) -> None: ...

class NodeHolding(_message.Message):
    __slots__ = ("name", "address", "zone", "me", "resident_bytes", "resident_extents", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    ME_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    zone: str
    me: bool
    resident_bytes: int
    resident_extents: int
    why: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., zone: _Optional[str] = ..., me: _Optional[bool] = ..., resident_bytes: _Optional[int] = ..., resident_extents: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class NodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("name", "address", "zone", "release", "weight_bytes", "extents", "state", "away_s", "why", "round_trip_us", "me", "block_round_trip_us", "bytes_per_s", "extent_bytes", "domain", "allow", "blocks", "source", "certificate_ends", "free_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AWAY_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    ME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    zone: str
    release: str
    weight_bytes: int
    extents: int
    state: str
    away_s: int
    why: str
    round_trip_us: int
    me: bool
    block_round_trip_us: int
    bytes_per_s: int
    extent_bytes: int
    domain: str
    allow: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    source: str
    certificate_ends: int
    free_bytes: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., zone: _Optional[str] = ..., release: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., extents: _Optional[int] = ..., state: _Optional[str] = ..., away_s: _Optional[int] = ..., why: _Optional[str] = ..., round_trip_us: _Optional[int] = ..., me: _Optional[bool] = ..., block_round_trip_us: _Optional[int] = ..., bytes_per_s: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., domain: _Optional[str] = ..., allow: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ..., source: _Optional[str] = ..., certificate_ends: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class ClusterWarning(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RemoveNodeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveNodeReply(_message.Message):
    __slots__ = ("untold", "listed")
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    untold: _containers.RepeatedScalarFieldContainer[str]
    listed: bool
    def __init__(self, untold: _Optional[_Iterable[str]] = ..., listed: _Optional[bool] = ...) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("nodes", "clustered", "list_read", "warnings")
    NODES_FIELD_NUMBER: _ClassVar[int]
    CLUSTERED_FIELD_NUMBER: _ClassVar[int]
    LIST_READ_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    clustered: bool
    list_read: bool
    warnings: _containers.RepeatedCompositeFieldContainer[ClusterWarning]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., clustered: _Optional[bool] = ..., list_read: _Optional[bool] = ..., warnings: _Optional[_Iterable[_Union[ClusterWarning, _Mapping]]] = ...) -> None: ...

class NodeCall(_message.Message):
    __slots__ = ("node", "method", "request")
    NODE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    node: str
    method: str
    request: bytes
    def __init__(self, node: _Optional[str] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ...) -> None: ...

class NodeAnswer(_message.Message):
    __slots__ = ("reply",)
    REPLY_FIELD_NUMBER: _ClassVar[int]
    reply: bytes
    def __init__(self, reply: _Optional[bytes] = ...) -> None: ...

class RelayRequest(_message.Message):
    __slots__ = ("protocol", "node", "method", "request", "own_user")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OWN_USER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    method: str
    request: bytes
    own_user: bool
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ..., own_user: _Optional[bool] = ...) -> None: ...

class EvictLaterRequest(_message.Message):
    __slots__ = ("nodes", "datasets")
    NODES_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    datasets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., datasets: _Optional[_Iterable[str]] = ...) -> None: ...

class EvictLaterReply(_message.Message):
    __slots__ = ("until",)
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    until: float
    def __init__(self, until: _Optional[float] = ...) -> None: ...

class StartPrefetchRequest(_message.Message):
    __slots__ = ("dataset", "id")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    dataset: str
    id: str
    def __init__(self, dataset: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class StartPrefetchReply(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class PrefetchesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchesReply(_message.Message):
    __slots__ = ("prefetches",)
    PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    prefetches: _containers.RepeatedCompositeFieldContainer[PrefetchStatus]
    def __init__(self, prefetches: _Optional[_Iterable[_Union[PrefetchStatus, _Mapping]]] = ...) -> None: ...

class PrefetchStatus(_message.Message):
    __slots__ = ("id", "dataset", "uri", "uid", "started", "detached", "state", "why", "progress")
    ID_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    dataset: str
    uri: str
    uid: int
    started: float
    detached: bool
    state: str
    why: str
    progress: PrefetchReply
    def __init__(self, id: _Optional[str] = ..., dataset: _Optional[str] = ..., uri: _Optional[str] = ..., uid: _Optional[int] = ..., started: _Optional[float] = ..., detached: _Optional[bool] = ..., state: _Optional[str] = ..., why: _Optional[str] = ..., progress: _Optional[_Union[PrefetchReply, _Mapping]] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CancelPrefetchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("extents", "size_bytes", "moved_extents", "moved_bytes", "unfit_bytes", "unknown_bytes", "own_bytes", "done")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNFIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    extents: int
    size_bytes: int
    moved_extents: int
    moved_bytes: int
    unfit_bytes: int
    unknown_bytes: int
    own_bytes: int
    done: bool
    def __init__(self, extents: _Optional[int] = ..., size_bytes: _Optional[int] = ..., moved_extents: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., unfit_bytes: _Optional[int] = ..., unknown_bytes: _Optional[int] = ..., own_bytes: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("protocol", "node", "dataset", "extents")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node: str
    dataset: str
    extents: bytes
    def __init__(self, protocol: _Optional[int] = ..., node: _Optional[str] = ..., dataset: _Optional[str] = ..., extents: _Optional[bytes] = ...) -> None: ...

class TakeReply(_message.Message):
    __slots__ = ("taken", "unknown")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    taken: bytes
    unknown: bool
    def __init__(self, taken: _Optional[bytes] = ..., unknown: _Optional[bool] = ...) -> None: ...
