"""Data sets of the Hugging Face hub by public name.

Where the hub cannot be reached, what was downloaded before is read from the cache of the package `datasets`; nothing is
set in that package for it, so that other code in the process is not affected.
"""

from __future__ import annotations

import functools
import os
import socket
import urllib.parse
import urllib.request
from typing import Any

from tailopt.optional import require

CONNECT_TIMEOUT = 5.0  # seconds


def dataset(name: str, *configuration: str, split: str, **options: Any) -> Any:
    """Load a split of a data set of the hub.

    Args:
        configuration: the name of a configuration of the data set, such as a pair of languages; none for the default.
        options: of `datasets.load_dataset`, such as revision.

    Raises:
        OSError: the data set cannot be had; the message names the option that takes files instead.
    """
    datasets = require("datasets", "Data by public name need datasets", extra="studies")
    try:
        if is_reachable():
            return datasets.load_dataset(name, *configuration, split=split, **options)
        return _downloaded_before(name, *configuration, split=split, **options)
    except Exception as error:  # the package raises what its network library raises
        reason = str(error).strip().split("\n")[0]
        raise OSError(
            f"Cannot get the data set {name!r} from the hub: {reason} Give the files themselves: --data PATH."
        ) from None


@functools.cache
def is_reachable() -> bool:
    """Whether the hub can be reached, found out once per process.

    The packages that download from it try for half a minute before they fail; one connection takes a few seconds at
    most. Behind a proxy only those packages can tell, so the answer is yes there.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if urllib.request.getproxies().keys() - {"no"}:  # "no" lists the hosts that need none
        return True
    endpoint = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or {"http": 80}.get(endpoint.scheme, 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=CONNECT_TIMEOUT).close()
    except OSError:
        return False
    return True


def _downloaded_before(name: str, *configuration: str, split: str, revision: str = "", **options: Any) -> Any:
    """Read a split from the cache of `datasets`, without the hub.

    `load_dataset` would ask the hub first, unless the whole process is offline. This is the class that it falls back
    to; the cache has no revisions, so the newest one that was downloaded is read.
    """
    cache = require("datasets.packaged_modules.cache.cache", "Data by public name need datasets", extra="studies")
    try:
        builder = cache.Cache(
            repo_id=name,
            dataset_name=name.split("/")[-1],
            config_name=configuration[0] if configuration else None,
            version="auto",
            hash="auto",
            **options,
        )
    except ValueError as error:  # where it has other configurations, the message lists them
        reason = str(error).replace("\n", "; ")
        raise FileNotFoundError(f"it cannot be reached, and there is no download from before ({reason}).") from None
    return builder.as_dataset(split=split)
