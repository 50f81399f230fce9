"""What NVML calls the reasons that slow a busy GPU down."""

THROTTLE_BITS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons; idle and application clocks are not among them."""


def throttle_reasons(bits: int) -> list[str]:
    """Names of the bits that are set."""
    return [name for bit, name in THROTTLE_BITS.items() if bits & bit]
