"""Read YAML that a user wrote, without aliases: with them a few lines can stand for more than fits in memory. No torch."""

from __future__ import annotations

from typing import Any

from dcpbench.errors import UsageError
from dcpbench.plan.options import shown
from dcpbench.show.text import one_line


def load_yaml(text: str, name: str, what: str) -> object:
    """Return what `text` holds. Raises UsageError, which names the file `name` and the contents `what`, for an alias or
    for text that is no YAML; ImportError without PyYAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses aliases."""

        def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - yaml has no types
            if self.check_event(yaml.AliasEvent):
                found: Any = self.peek_event()  # type: ignore[no-untyped-call]
                raise UsageError(
                    f"{name}, line {found.start_mark.line + 1}: {what} are read without aliases, and "
                    f"*{shown(found.anchor)} is one; write out what it stands for."
                )
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ArithmeticError, ValueError, RecursionError) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else one_line(str(e)).rstrip(".")
        raise UsageError(f"{name} is not valid YAML: {why}.") from e
