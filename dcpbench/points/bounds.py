"""Define bounds of the numbers in points and records. A line that violates one is refused when it is decoded. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_NUMBER = 10**15  # a petabyte, or 31,000 years in ms
MAX_RATE = 10**18  # operations per second, hundreds of times those of the fastest GPUs

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Number = Annotated[float, msgspec.Meta(ge=0, le=MAX_NUMBER)]
PositiveNumber = Annotated[float, msgspec.Meta(gt=0, le=MAX_NUMBER)]
SignedCount = Annotated[int, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
SignedNumber = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=MAX_RATE)]
