"""One fixed example of every message type, made from its fields, for golden bytes."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import inspect as mi

from messages.envelope import Message


def sample(cls: type[Message]) -> Message:
    """Every field filled with a value that depends on its type and name only."""
    return cls(**{field.name: _value(mi.type_info(field.type), field.name) for field in msgspec.structs.fields(cls)})


def _value(kind: mi.Type, name: str) -> Any:
    match kind:
        case mi.IntType():
            return len(name)
        case mi.FloatType():
            return len(name) / 2
        case mi.BoolType():
            return True
        case mi.StrType():
            return name
        case mi.EnumType():
            members: list[enum.Enum] = list(kind.cls)
            return members[0]
        case mi.StructType():
            return kind.cls(**{field.name: _value(field.type, field.name) for field in kind.fields})
        case mi.VarTupleType():
            return (_value(kind.item_type, name),)
        case mi.TupleType():
            return tuple(_value(item, name) for item in kind.item_types)
        case mi.ListType():
            return [_value(kind.item_type, name)]
        case mi.DictType():
            return {name: _value(kind.value_type, name)}
        case mi.UnionType():
            return _value(next(each for each in kind.types if not isinstance(each, mi.NoneType)), name)
        case _:
            raise AssertionError(f"no sample for {kind}")
