from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_CALL: _ClassVar[Kind]
    KIND_RESULT: _ClassVar[Kind]
    KIND_ERROR: _ClassVar[Kind]
    KIND_CANCEL: _ClassVar[Kind]
    KIND_SUPERVISION: _ClassVar[Kind]
    KIND_CHANNEL_OPEN: _ClassVar[Kind]
    KIND_CHANNEL_DATA: _ClassVar[Kind]
    KIND_CHANNEL_CREDIT: _ClassVar[Kind]
    KIND_CLOSE: _ClassVar[Kind]
    KIND_STREAM_OPEN: _ClassVar[Kind]
    KIND_STREAM_ITEM: _ClassVar[Kind]
    KIND_STREAM_END: _ClassVar[Kind]
    KIND_STREAM_CREDIT: _ClassVar[Kind]
    KIND_BUFFER_RETURN: _ClassVar[Kind]
    KIND_CHANNEL_NOTE: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
KIND_CALL: Kind
KIND_RESULT: Kind
KIND_ERROR: Kind
KIND_CANCEL: Kind
KIND_SUPERVISION: Kind
KIND_CHANNEL_OPEN: Kind
KIND_CHANNEL_DATA: Kind
KIND_CHANNEL_CREDIT: Kind
KIND_CLOSE: Kind
KIND_STREAM_OPEN: Kind
KIND_STREAM_ITEM: Kind
KIND_STREAM_END: Kind
KIND_STREAM_CREDIT: Kind
KIND_BUFFER_RETURN: Kind
KIND_CHANNEL_NOTE: Kind

class StreamCredit(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: int
    def __init__(self, items: _Optional[int] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("origin", "type_name", "message", "traceback", "exception_type", "args", "attributes")
    class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HANDLER: _ClassVar[CallError.Origin]
        METHOD_NOT_FOUND: _ClassVar[CallError.Origin]
        SERIALIZATION: _ClassVar[CallError.Origin]
        UNAVAILABLE: _ClassVar[CallError.Origin]
        STATE_LOST: _ClassVar[CallError.Origin]
    HANDLER: CallError.Origin
    METHOD_NOT_FOUND: CallError.Origin
    SERIALIZATION: CallError.Origin
    UNAVAILABLE: CallError.Origin
    STATE_LOST: CallError.Origin
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TYPE_NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_TYPE_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    origin: CallError.Origin
    type_name: str
    message: str
    traceback: str
    exception_type: bytes
    args: bytes
    attributes: _containers.ScalarMap[str, bytes]
    def __init__(self, origin: _Optional[_Union[CallError.Origin, str]] = ..., type_name: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., exception_type: _Optional[bytes] = ..., args: _Optional[bytes] = ..., attributes: _Optional[_Mapping[str, bytes]] = ...) -> None: ...
