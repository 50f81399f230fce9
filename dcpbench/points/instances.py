"""Parse --disaggregate: how many instances of a layout serve together, and what each does. No torch."""

from __future__ import annotations

import dataclasses
import re

from dcpbench.errors import UsageError

MAX_INSTANCES = 256  # maximum number of instances of one point; more only take longer
HOW_TO_WRITE = "write P:D such as 1:2 (or 1P2D), or a number such as 3 for instances that do both"
_SPLIT = re.compile(r"(\d{1,9})\s*(?::|[pP])\s*(\d{1,9})\s*[dD]?")
_COUNT = re.compile(r"\d{1,9}")


@dataclasses.dataclass(frozen=True)
class Instances:
    """Describe the instances of one layout behind a router, each on its own GPUs."""

    prefill: int = 0  # number of instances that only prefill
    decode: int = 0  # number of instances that only decode
    both: int = 0  # number of instances that do both; if it is not 0 there are no others

    @property
    def count(self) -> int:
        """Number of all instances."""
        return self.prefill + self.decode + self.both

    @property
    def disaggregated(self) -> bool:
        """Return True if KV is sent from one instance to another."""
        return not self.both

    @property
    def serving(self) -> int:
        """Number of instances in which requests decode."""
        return self.decode + self.both

    def __str__(self) -> str:
        """Return the text that a point stores: `1:2`, `3`, or an empty string for one instance that does both."""
        if self.disaggregated:
            return f"{self.prefill}:{self.decode}"
        return "" if self.both == 1 else f"{self.both}"

    @property
    def label(self) -> str:
        """Return the text printed behind a layout: `1P2D`, `×3`; empty for one instance that does both."""
        if self.disaggregated:
            return f"{self.prefill}P{self.decode}D"
        return "" if self.both == 1 else f"×{self.both}"

    def convert_to_both(self) -> Instances:
        """Return the same number of instances, all of which do both."""
        return Instances(both=self.count)


def parse_instances(value: object) -> Instances:
    """Parse `1:2`, `1P2D`, `3` or an empty value; raise UsageError with the accepted forms."""
    text = "" if isinstance(value, bool) else str(value).strip()
    if text == "":
        return Instances(both=1)
    if found := _SPLIT.fullmatch(text):
        made = Instances(prefill=int(found[1]), decode=int(found[2]))
        if not made.prefill or not made.decode:
            side = "prefill" if not made.prefill else "decode"
            raise UsageError(f"--disaggregate {text}: no instance would {side}; {HOW_TO_WRITE}.")
    elif _COUNT.fullmatch(text):
        made = Instances(both=int(text))
    else:
        raise UsageError(f"--disaggregate {text[:80]}: not a ratio of instances; {HOW_TO_WRITE}.")
    if not 1 <= made.count <= MAX_INSTANCES:
        raise UsageError(f"--disaggregate {text}: {made.count:,} instances; write 1 to {MAX_INSTANCES} in all.")
    return made


def count_gpus(each: int, disaggregate: str, prefill_gpus: int = 0) -> int:
    """Return the number of GPUs of all instances, or 0 if `each` is 0, which means an unknown layout.

    `each` is the number of GPUs of an instance, `prefill_gpus` that of a prefill instance if it differs. Raise
    UsageError for a text that `parse_instances` refuses.
    """
    found = parse_instances(disaggregate)
    return each * found.serving + (prefill_gpus or each) * found.prefill if each else 0
