"""A save that goes on in a thread while the loop trains.

It is finished whatever ends the script: the interpreter runs `_at_exit` after a normal end, `sys.exit` and an exception
that nobody caught, and waits there. Only what ends a process at once (kill -9, a signal that nothing handles) cuts it
off. An error is kept until somebody waits for the save, and printed at the end when nobody did.

Python 3.12.0 to 3.12.2 start no thread once the main one is over, and Orbax needs some: there such a save fails with a
message (python/cpython issue 113964), so call `close`.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its own hook must be there before ours, see `_register_atexit` below
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class SaveError(RuntimeError):
    """A save failed; the message says which step and why. The older steps are as they were."""

    def __init__(self, step: int, folder: Path, cause: BaseException):
        super().__init__(
            f"step {step} was not saved in {folder}: {cause}; "
            f"older steps are as they were, and {step} can be saved again"
        )
        self.step = step


class Save:
    """One save: its thread, and how it ended."""

    def __init__(self, step: int, folder: Path, write: Callable[[Callable[[], None]], None]):
        """Args:
        write: does the save, and calls what it is given as soon as the arrays may be donated.
        """
        self.step = step
        self.folder = folder
        self._write = write
        self._error: BaseException | None = None
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}")

    def start(self) -> bool:
        """Begins, and returns once the arrays may be donated; False when it has failed already."""
        _running.add(self)
        self._thread.start()
        self._copied.wait()
        return self._error is None

    def wait(self) -> None:
        """Waits until all is on disk.

        Raises:
          SaveError: it failed.
        """
        self._thread.join()
        _running.discard(self)
        if self._error is not None:
            raise SaveError(self.step, self.folder, self._error) from self._error

    def _run(self) -> None:
        try:
            self._write(self._copied.set)
        except BaseException as error:  # told by `wait`
            self._error = error
        finally:
            self._copied.set()


_running: set[Save] = set()  # those that nobody has waited for


def let_others_finish(folder: Path) -> None:
    """Waits for saves into a folder that another object began; their errors are told to who began them."""
    for save in list(_running):
        if save.folder == folder:
            save._thread.join()


def _at_exit() -> None:
    for save in list(_running):
        try:
            save.wait()
        except SaveError as error:
            print(f"error: {error}", file=sys.stderr)


# A save that is still running needs thread pools, and the interpreter stops those before it calls `atexit`. So this is
# the hook that stops them (concurrent.futures.thread), which runs in reverse order and has no public name.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
