from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("node_id", "pid", "attempt")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    pid: int
    attempt: int
    def __init__(self, node_id: _Optional[str] = ..., pid: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("label", "index", "group_size", "run_dir", "socket_dir", "cwd", "sys_path", "env", "threads", "argv", "cpus", "grace_s", "devices", "membership", "state", "main")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MainEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABEL_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    SOCKET_DIR_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    SYS_PATH_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MAIN_FIELD_NUMBER: _ClassVar[int]
    label: str
    index: int
    group_size: int
    run_dir: str
    socket_dir: str
    cwd: str
    sys_path: _containers.RepeatedScalarFieldContainer[str]
    env: _containers.ScalarMap[str, str]
    threads: int
    argv: _containers.RepeatedScalarFieldContainer[str]
    cpus: _containers.RepeatedScalarFieldContainer[int]
    grace_s: float
    devices: _containers.RepeatedScalarFieldContainer[int]
    membership: Membership
    state: bytes
    main: _containers.ScalarMap[str, str]
    def __init__(self, label: _Optional[str] = ..., index: _Optional[int] = ..., group_size: _Optional[int] = ..., run_dir: _Optional[str] = ..., socket_dir: _Optional[str] = ..., cwd: _Optional[str] = ..., sys_path: _Optional[_Iterable[str]] = ..., env: _Optional[_Mapping[str, str]] = ..., threads: _Optional[int] = ..., argv: _Optional[_Iterable[str]] = ..., cpus: _Optional[_Iterable[int]] = ..., grace_s: _Optional[float] = ..., devices: _Optional[_Iterable[int]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., state: _Optional[bytes] = ..., main: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("run", "host", "reached_at", "credentials", "silence_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    REACHED_AT_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    host: str
    reached_at: str
    credentials: bytes
    silence_s: float
    def __init__(self, run: _Optional[str] = ..., host: _Optional[str] = ..., reached_at: _Optional[str] = ..., credentials: _Optional[bytes] = ..., silence_s: _Optional[float] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("address", "endpoint", "failing")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FAILING_FIELD_NUMBER: _ClassVar[int]
    address: str
    endpoint: str
    failing: bool
    def __init__(self, address: _Optional[str] = ..., endpoint: _Optional[str] = ..., failing: _Optional[bool] = ...) -> None: ...

class Resolve(_message.Message):
    __slots__ = ("id", "address", "now")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    id: int
    address: str
    now: bool
    def __init__(self, id: _Optional[int] = ..., address: _Optional[str] = ..., now: _Optional[bool] = ...) -> None: ...

class Resolved(_message.Message):
    __slots__ = ("id", "endpoint", "unavailable", "not_in_program")
    ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NOT_IN_PROGRAM_FIELD_NUMBER: _ClassVar[int]
    id: int
    endpoint: str
    unavailable: str
    not_in_program: bool
    def __init__(self, id: _Optional[int] = ..., endpoint: _Optional[str] = ..., unavailable: _Optional[str] = ..., not_in_program: _Optional[bool] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("names", "values", "step", "has_step", "event")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_STEP_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[float]
    step: int
    has_step: bool
    event: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[float]] = ..., step: _Optional[int] = ..., has_step: _Optional[bool] = ..., event: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("type_name", "message", "traceback", "is_unavailable", "is_plain_echo")
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    IS_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    IS_PLAIN_ECHO_FIELD_NUMBER: _ClassVar[int]
    type_name: str
    message: str
    traceback: str
    is_unavailable: bool
    is_plain_echo: bool
    def __init__(self, type_name: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., is_unavailable: _Optional[bool] = ..., is_plain_echo: _Optional[bool] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ping(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: int
    def __init__(self, calls: _Optional[int] = ...) -> None: ...

class KeptState(_message.Message):
    __slots__ = ("id", "addresses", "watch")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    id: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    watch: bool
    def __init__(self, id: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., watch: _Optional[bool] = ...) -> None: ...

class Stacks(_message.Message):
    __slots__ = ("id", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("kind", "thread", "started", "age_s", "endpoint", "address_id", "peer", "what", "ends", "place")
    KIND_FIELD_NUMBER: _ClassVar[int]
    THREAD_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    thread: int
    started: float
    age_s: float
    endpoint: str
    address_id: str
    peer: str
    what: str
    ends: bool
    place: str
    def __init__(self, kind: _Optional[str] = ..., thread: _Optional[int] = ..., started: _Optional[float] = ..., age_s: _Optional[float] = ..., endpoint: _Optional[str] = ..., address_id: _Optional[str] = ..., peer: _Optional[str] = ..., what: _Optional[str] = ..., ends: _Optional[bool] = ..., place: _Optional[str] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("endpoint", "size", "active", "quick")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUICK_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    size: int
    active: int
    quick: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, endpoint: _Optional[str] = ..., size: _Optional[int] = ..., active: _Optional[int] = ..., quick: _Optional[_Iterable[str]] = ...) -> None: ...

class Waits(_message.Message):
    __slots__ = ("old_s", "activities", "pools", "positions")
    OLD_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    old_s: float
    activities: _containers.RepeatedCompositeFieldContainer[Activity]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    positions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, old_s: _Optional[float] = ..., activities: _Optional[_Iterable[_Union[Activity, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., positions: _Optional[_Iterable[str]] = ...) -> None: ...

class ReservePort(_message.Message):
    __slots__ = ("id", "address")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: int
    address: str
    def __init__(self, id: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("id", "rule", "action", "ways", "delay_s", "after", "count", "reason")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REPORT: _ClassVar[Fault.Action]
        HEAL: _ClassVar[Fault.Action]
        DROP: _ClassVar[Fault.Action]
        DELAY: _ClassVar[Fault.Action]
        CUT: _ClassVar[Fault.Action]
        PARTITION: _ClassVar[Fault.Action]
    REPORT: Fault.Action
    HEAL: Fault.Action
    DROP: Fault.Action
    DELAY: Fault.Action
    CUT: Fault.Action
    PARTITION: Fault.Action
    class Way(_message.Message):
        __slots__ = ("node", "endpoint", "is_outgoing")
        NODE_FIELD_NUMBER: _ClassVar[int]
        ENDPOINT_FIELD_NUMBER: _ClassVar[int]
        IS_OUTGOING_FIELD_NUMBER: _ClassVar[int]
        node: str
        endpoint: str
        is_outgoing: bool
        def __init__(self, node: _Optional[str] = ..., endpoint: _Optional[str] = ..., is_outgoing: _Optional[bool] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    rule: str
    action: Fault.Action
    ways: _containers.RepeatedCompositeFieldContainer[Fault.Way]
    delay_s: float
    after: int
    count: int
    reason: str
    def __init__(self, id: _Optional[int] = ..., rule: _Optional[str] = ..., action: _Optional[_Union[Fault.Action, str]] = ..., ways: _Optional[_Iterable[_Union[Fault.Way, _Mapping]]] = ..., delay_s: _Optional[float] = ..., after: _Optional[int] = ..., count: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class FaultReport(_message.Message):
    __slots__ = ("id", "hits", "rule")
    ID_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    id: int
    hits: int
    rule: str
    def __init__(self, id: _Optional[int] = ..., hits: _Optional[int] = ..., rule: _Optional[str] = ...) -> None: ...

class InnerNodes(_message.Message):
    __slots__ = ("id", "colocation", "stop")
    ID_FIELD_NUMBER: _ClassVar[int]
    COLOCATION_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    colocation: str
    stop: bool
    def __init__(self, id: _Optional[int] = ..., colocation: _Optional[str] = ..., stop: _Optional[bool] = ...) -> None: ...

class Hear(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Supervision(_message.Message):
    __slots__ = ("hello", "start", "register", "resolve", "resolved", "metrics", "ended", "stop", "stop_request", "ping", "stacks", "reserve_port", "inner_nodes", "waits", "fault", "fault_report", "hear", "kept_state")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    RESOLVE_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_PORT_FIELD_NUMBER: _ClassVar[int]
    INNER_NODES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    FAULT_REPORT_FIELD_NUMBER: _ClassVar[int]
    HEAR_FIELD_NUMBER: _ClassVar[int]
    KEPT_STATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    start: Start
    register: Register
    resolve: Resolve
    resolved: Resolved
    metrics: Metrics
    ended: Ended
    stop: Stop
    stop_request: StopRequest
    ping: Ping
    stacks: Stacks
    reserve_port: ReservePort
    inner_nodes: InnerNodes
    waits: Waits
    fault: Fault
    fault_report: FaultReport
    hear: Hear
    kept_state: KeptState
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., resolve: _Optional[_Union[Resolve, _Mapping]] = ..., resolved: _Optional[_Union[Resolved, _Mapping]] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., stop_request: _Optional[_Union[StopRequest, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., stacks: _Optional[_Union[Stacks, _Mapping]] = ..., reserve_port: _Optional[_Union[ReservePort, _Mapping]] = ..., inner_nodes: _Optional[_Union[InnerNodes, _Mapping]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., fault_report: _Optional[_Union[FaultReport, _Mapping]] = ..., hear: _Optional[_Union[Hear, _Mapping]] = ..., kept_state: _Optional[_Union[KeptState, _Mapping]] = ...) -> None: ...
