from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fault(_message.Message):
    __slots__ = ("rule", "action", "ways", "delay_s", "after", "count", "reason")
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
    RULE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rule: str
    action: Fault.Action
    ways: _containers.RepeatedCompositeFieldContainer[Fault.Way]
    delay_s: float
    after: int
    count: int
    reason: str
    def __init__(self, rule: _Optional[str] = ..., action: _Optional[_Union[Fault.Action, str]] = ..., ways: _Optional[_Iterable[_Union[Fault.Way, _Mapping]]] = ..., delay_s: _Optional[float] = ..., after: _Optional[int] = ..., count: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
