"""Which attention runs on a device, and why."""

from __future__ import annotations

from typing import Any, Final

from jorca.attention.api import abilities_of
from jorca.config import ATTENTIONS, ConfigError

_EVERYWHERE: Final = "xla"


def choose_attention(
    name: str,
    device: Any,
    *,
    page_size: int | None = None,
    head_dim: int | None = None,
    dtype: Any = None,
    group_size: int | None = None,
) -> tuple[str, str]:
    """Returns the implementation to use, and the reason in words.

    Args:
      name: What the user asked for. "auto" takes the first in `ATTENTIONS` that is made for the device and
        takes the sizes that follow, and `xla` if there is none.
      device: One of the devices that run the model.
      page_size: Positions in a page, S; None if it does not matter yet, likewise below.
      head_dim: Head width, H.
      dtype: Of queries, keys and values.
      group_size: Query heads that share one key/value head.

    Raises:
      ConfigError: There is none of that name, or it does not run on the device, or does not take the sizes.
    """
    sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": dtype, "group_size": group_size}
    if name != "auto":
        who, abilities = f"attention {name}", abilities_of(name)
        if reason := abilities.why_not_on(who, device) or abilities.why_not(who, **sizes):
            raise ConfigError(reason)
        return name, "asked for by name"
    refused = None
    for candidate in ATTENTIONS:
        try:
            abilities = abilities_of(candidate)
        except ConfigError as error:  # this JAX cannot import it
            refused = refused or str(error)
            continue
        reason = abilities.why_on(device)
        if reason is None:
            continue
        why_not = abilities.why_not(f"attention {candidate}", **sizes)
        if why_not is None:
            return candidate, refused or reason
        refused = refused or why_not
    return _EVERYWHERE, refused or f"there is no kernel for {device.device_kind} yet, and it runs everywhere"
