"""Read YAML that a user wrote, with bounded aliases: a few lines of them can expand to more than fits in memory. No
torch.
"""

from __future__ import annotations

from typing import Any

from dcpbench.errors import UsageError
from dcpbench.plan.option_parsers import format_value
from dcpbench.show.text import fit_line


def load_yaml(text: str, name: str, what: str, *, max_values: int = 0) -> object:
    """Return the value of `text`, with aliases only if it has at most `max_values` values after expansion; 0 forbids
    aliases. `1:2` is text, as in YAML 1.2.

    Raise UsageError, which names the file `name` and the contents `what`, for other aliases, for a key that is there twice, and
    for invalid YAML; raise ImportError without PyYAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Count values with aliases expanded, before any is constructed."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._values = 0
            self._sizes: dict[int, int] = {}  # number of values of each complete node, by its id

        def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - yaml has no types
            alias: Any = self.peek_event() if self.check_event(yaml.AliasEvent) else None  # type: ignore[no-untyped-call]
            if alias is not None and not max_values:
                raise UsageError(
                    f"{name}, line {alias.start_mark.line + 1}: {what} are read without aliases, and "
                    f"*{format_value(alias.anchor)} is one; write out what it stands for."
                )
            before = self._values
            node = super().compose_node(parent, index)
            if alias is None:
                self._values += 1
                self._sizes[id(node)] = self._values - before
                return node
            where = f"{name}, line {alias.start_mark.line + 1}: *{format_value(alias.anchor)}"
            if id(node) not in self._sizes:
                raise UsageError(f"{where} holds itself; write out what it stands for.")
            self._values += self._sizes[id(node)]
            if self._values > max_values:
                raise UsageError(f"{where} makes more than {max_values:,} values; write out what is needed.")
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:  # noqa: ANN401 - as above
            return _check_keys(super().compose_mapping_node(anchor), name)

        def construct_scalar_number(self, node: Any) -> object:  # noqa: ANN401 - as above
            """Return text for digits with colons, which YAML 1.1 reads as a number of base 60."""
            return node.value if ":" in node.value else yaml.SafeLoader.yaml_constructors[node.tag](self, node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_scalar_number)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_scalar_number)
    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ArithmeticError, ValueError, RecursionError) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else fit_line(str(e)).rstrip(".")
        raise UsageError(f"{name} is not valid YAML: {why}.") from e


def _check_keys(node: Any, name: str) -> Any:  # noqa: ANN401 - as above
    """Return a mapping; raise UsageError for a key that is there twice, of which PyYAML would keep the last value."""
    seen = set()
    for key in (key for key, _ in node.value if key.id == "scalar"):
        if key.value in seen:
            where = f"{name}, line {key.start_mark.line + 1}"
            raise UsageError(f"{where}: '{format_value(key.value)}' is there twice; give it once.")
        seen.add(key.value)
    return node
