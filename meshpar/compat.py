"""The few places where the supported jax versions differ, or where jax has no public question to ask.

Everything else imports jax directly; a name leaves this file when the oldest supported version no longer needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


def backend_started() -> bool:
    """Whether jax has already looked for devices, after which their number and the XLA flags are fixed.

    Does not start the backend. jax has no public function for this, but a documented rule: from then on
    `jax_num_cpu_devices` refuses a new value. So a new value is tried and put back.
    """
    config: Any = jax.config  # the annotations of jax 0.10 do not list the option
    current = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", current + 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", current)
    return False


@contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Compiles with names and source lines as part of the key of jax's compilation cache: without it a program is found
    there that was compiled from other lines, and its text tells those.
    """
    config: Any = jax.config  # the annotations of jax do not list the option
    before = config.jax_compilation_cache_include_metadata_in_key
    config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield
    finally:
        config.update("jax_compilation_cache_include_metadata_in_key", before)


def has_cudnn() -> bool:
    """Whether jax can load cuDNN, which it asks for where attention is traced: a machine that only compiles for GPUs
    may have none. jax keeps the question private.
    """
    try:
        from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version
    except ImportError:
        return True
    try:
        check_cudnn_version()
    except RuntimeError:
        return False
    return True


def coordination_client() -> Any:
    """The store of names and values that all processes of a job share; None with one process. jax keeps it private."""
    from jax._src import distributed

    return distributed.global_state.client


def wait_at_barrier(name: str, seconds: int) -> None:
    """Returns when every process of `jax.distributed.initialize` has called this with `name`; raises after `seconds`.

    jax's public barrier, `multihost_utils.sync_global_devices`, is a collective, and on CPU the first one of a group
    gives up on processes that come half a minute late. This one asks the coordinator, as Orbax does.
    """
    coordination_client().wait_at_barrier(name, seconds * 1000)


def same_trace(x: jax.Array, y: jax.Array) -> bool:
    """Whether two values belong to one function that is being traced, and not one to a function inside the other's. jax
    keeps what a tracer belongs to private.
    """
    return getattr(x, "_trace", None) is getattr(y, "_trace", None)
