"""JSON that somebody else has left, whatever it holds: a value whose size, depth and text are
harmless, or a ValueError; `fits` says whether it has the form that was expected, which `form_of`
has from the NamedTuple that `built` makes of it.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Mapping, NoReturn, Union

from . import files

#: bytes; ten times the largest that we write (a measurement of the clocks of 10,000 hosts)
MOST = 64 << 20

#: an integer beyond it is no time, size or number of ours, and would not fit into 64 bits
FARTHEST = 1 << 62


def load(path: files.Path, ours: bool = False, links: bool = False) -> Any:
    """The value in a JSON file; `ours` and `links` as for `files.opened`.

    Raises OSError, ValueError.
    """
    return parse(files.content(path, MOST, links, ours))


def parse(text: Union[str, bytes]) -> Any:
    """The value that `text` is. Raises ValueError, for nesting that no parser stands as well."""
    plain = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in plain or "\\uD" in plain:
        # half a character can be printed nowhere; bytes of a file name that are no UTF-8 can
        json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError("%s is no number of JSON" % constant)


def fits(value: Any, form: Any) -> bool:
    """Whether `value` has the form.

    A form is a type (an int is one of 64 bits), None, a range of ints, a function that decides, a
    tuple of forms of which one will do, `[form]` for a list of any length and `[form, form]` for
    one of two, or `{key: form}` for an object that has these keys; `"key?"` need not be there.
    """
    if isinstance(form, tuple):
        return any(fits(value, choice) for choice in form)
    if isinstance(form, list):
        if not isinstance(value, list) or len(form) not in (1, len(value)):
            return False
        return all(map(fits, value, form * len(value)))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            fits(value[name], member) if name in value else name != key
            for key, member in form.items()
            for name in [key.rstrip("?")]
        )
    if form is None or isinstance(form, (range, type)):
        return _is_plain(value, form)
    return bool(form(value))


def _is_plain(value: Any, form: Any) -> bool:
    if form is None or form is bool or isinstance(value, bool):
        return value is None if form is None else form is type(value)
    if isinstance(form, range):
        return isinstance(value, int) and value in form
    return isinstance(value, form) and not (isinstance(value, int) and abs(value) >= FARTHEST)


def form_of(kind: Any, limits: Mapping[str, Any]) -> Any:
    """The form of the JSON of a type: a NamedTuple (a field with a default need not be there),
    Optional, List, Tuple or Dict, or a form. `limits`: by a field's name its form, over its type's.
    """
    origin = getattr(kind, "__origin__", kind)  # typing.get_origin takes three times as long
    if origin is Union:
        return form_of(kind.__args__[0], limits), None
    if origin in (list, tuple):
        return [form_of(kind.__args__[0], limits)]
    if not hasattr(kind, "_fields"):
        return origin
    return {
        name + "?" * (name in kind._field_defaults): limits.get(name) or form_of(field, limits)
        for name, field in kind.__annotations__.items()
    }


def built(kind: Any, value: Any) -> Any:
    """The value of a type from JSON of its form; what a NamedTuple has no field for is left out."""
    origin = getattr(kind, "__origin__", kind)
    if origin is Union:
        return None if value is None else built(kind.__args__[0], value)
    if origin is tuple:
        return tuple(value)
    if not hasattr(kind, "_fields"):
        return value
    fields: Dict[str, Any] = kind.__annotations__
    return kind(**{name: built(fields[name], value[name]) for name in fields if name in value})
