"""Replaces attributes of other people's modules, and puts back exactly what was there."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attributes that were replaced, to be put back in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, **values: Any) -> None:
        """Sets attributes of a module or class, whether they existed or not."""
        for name, value in values.items():
            # A class's own entry, not what a look-up would make of it: else a static method came back as a function.
            self._before.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)

    def put_where_there(self, owner: Any, **values: Any) -> None:
        """Sets those attributes that this version of the module has."""
        self.put(owner, **{name: value for name, value in values.items() if hasattr(owner, name)})

    def restore(self) -> None:
        """Puts everything back."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
