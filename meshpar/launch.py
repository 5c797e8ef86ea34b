"""Several processes of one command on this machine, as if they were hosts: `python -m meshpar launch`.

Each gets its number in the environment, where `meshpar.mesh.distributed.join` finds it, and prints behind that number.
When one dies, the launcher says how, ends the others, which would wait for it, and may start all of them again: a
command that resumes then goes on from its last checkpoint. SIGTERM and Ctrl-C are handed on, so that a run can save.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

GRACE = 10.0  # seconds between SIGTERM and SIGKILL for those that are left: they wait for one that is gone
BAD_INPUT = 2  # the exit code of a wrong flag or value, which no restart makes right
_POLL = 0.05  # seconds between two looks at the processes

# What gloo, the communication between CPU processes, prints for each device and group that it connects.
_GLOO = re.compile(rb"\[Gloo\] Rank |is connected to|peer ranks\. Expected number of connected peer ranks is :|[\d\s]")

EXAMPLES = """\
examples:
  two processes of 4 emulated CPU devices each, which make one mesh of 8:
    python -m meshpar launch --processes 2 --devices 4 -- \\
        python -m experiments.train_lm --recipe llama_tiny_stdlib --set mesh="data=2 tensor=4"
  the same, started again up to 3 times when a process dies, from the last checkpoint:
    python -m meshpar launch --processes 2 --devices 4 --max-restarts 3 -- python -m experiments.train_lm ...

On a cluster its own launcher (srun, mpirun, GKE) starts the processes: see experiments/launch.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m meshpar launch FLAGS -- COMMAND`; returns 0, or the exit code of the process that died first."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        prog="python -m meshpar launch",
        usage="python -m meshpar launch --processes N [flags] -- COMMAND ...",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, required=True, help="how many processes to start")
    parser.add_argument(
        "--devices", type=int, help="emulate so many CPU devices in each (default: the command finds its devices)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, help="how often to start all again (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, help="where process 0 listens, on 127.0.0.1 (default: a free port each time)"
    )
    options = parser.parse_args(flags)
    try:
        return launch(
            command,
            processes=options.processes,
            devices=options.devices,
            max_restarts=options.max_restarts,
            port=options.port,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices: int | None = None,
    max_restarts: int = 0,
    port: int | None = None,
) -> int:
    """Runs a command in several processes until all have ended well, or one has died once too often.

    Args:
      command: program and arguments. It finds MESHPAR_COORDINATOR, MESHPAR_PROCESSES, MESHPAR_PROCESS, MESHPAR_RESTARTS
        (how often all were started again) and MESHPAR_STARTED (when they were first) in its environment.
      processes: how many.
      devices: CPU devices that each emulates, as MESHPAR_DEVICES; None: those that the command finds.
      max_restarts: how often all are started again after one died, unless with exit code 2 or after a signal to us.
      port: of process 0; None: a free one for each start.

    Returns:
      0, or the exit code of the process that died first; 128 + n where signal n killed it.

    Raises:
      ValueError: there is no command, or a number is out of range.
    """
    for flag, value, least in (
        ("--processes", processes, 1),
        ("--devices", devices, 1),
        ("--max-restarts", max_restarts, 0),
        ("--port", port, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} {value} must be at least {least}; use {least} or more")
    if not command:
        raise ValueError("there is no command to run; write it after --, as in -- python -m experiments.train_lm")
    surroundings = {"MESHPAR_PROCESSES": str(processes), "MESHPAR_STARTED": time.strftime("%Y%m%d-%H%M%S")}
    if devices is not None:
        surroundings |= {"MESHPAR_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    for restarts in range(max_restarts + 1):
        surroundings |= {"MESHPAR_COORDINATOR": f"127.0.0.1:{port or _free_port()}", "MESHPAR_RESTARTS": str(restarts)}
        with _Attempt(command, processes, surroundings) as attempt:
            code = attempt.wait()
        if code in (0, BAD_INPUT) or attempt.signalled:
            break
        if restarts < max_restarts:
            _say(f"starting all {processes} again, restart {restarts + 1} of {max_restarts}")
    return code


class _Attempt:
    """The processes of one start, from their start to the end of the last one."""

    def __init__(self, command: Sequence[str], processes: int, surroundings: dict[str, str]):
        self._signals: list[int] = []  # that we got
        self._handed_on = 0  # how many of them the members got
        self._members: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._command, self._processes, self._surroundings = command, processes, surroundings
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> _Attempt:
        # only noted: a handler may run before the member that it would have to tell is known
        self._handlers.enter_context(_on_signals(self._signals.append))
        try:
            for number in range(self._processes):
                self._start(number)
        except OSError as error:
            self._end_all()
            raise ValueError(f"{self._command[0]} cannot be started ({error.strerror}); name a program") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._end_all()
        self._handlers.close()

    @property
    def signalled(self) -> bool:
        """Whether somebody asked us to stop."""
        return bool(self._signals)

    def wait(self) -> int:
        """The exit code of the process that dies first, after the others were ended; 0 when all end well."""
        while True:
            self._hand_on()
            codes = [member.poll() for member in self._members]
            failed = [number for number, code in enumerate(codes) if code]
            if failed:
                first = min(failed, key=lambda number: _guilt(codes[number] or 0))
                code = codes[first] or 0
                left = codes.count(None)
                _say(f"process {first} {_how(code)}{f'; ending the other {left}' if left else ''}")
                self._end_all()
                return code if code > 0 else 128 - code
            if None not in codes:
                return 0
            time.sleep(_POLL)

    def _start(self, number: int) -> None:
        environment = os.environ | self._surroundings | {"MESHPAR_PROCESS": str(number), "PYTHONUNBUFFERED": "1"}
        member = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: it ends with its children, and Ctrl-C comes through us
        )
        self._members.append(member)
        prefix = f"[{number:{len(str(self._processes - 1))}}] ".encode()
        reader = threading.Thread(target=_print_behind, args=(prefix, member), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _hand_on(self) -> None:
        """Gives the first signal to all, and kills all at the second."""
        while self._handed_on < len(self._signals):
            self._send(signal.SIGKILL if self._handed_on else signal.Signals(self._signals[0]))
            self._handed_on += 1

    def _send(self, what: signal.Signals) -> None:
        for member in self._members:
            if member.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(member.pid, what)

    def _end_all(self) -> None:
        if not self._handed_on:  # those that were told already may be about to save
            self._send(signal.SIGTERM)
        until = time.monotonic() + GRACE
        while time.monotonic() < until and any(member.poll() is None for member in self._members):
            self._hand_on()
            time.sleep(_POLL)
        self._send(signal.SIGKILL)
        for member in self._members:
            member.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)  # what a child of the command holds open is not waited for


def _print_behind(prefix: bytes, member: subprocess.Popen[bytes]) -> None:
    assert member.stdout is not None
    of_gloo = 0  # lines that its threads began and did not end: they print into one another
    with member.stdout as lines:
        for line in lines:
            of_gloo += line.count(b"[Gloo] Rank ")
            if of_gloo and not _GLOO.sub(b"", line):
                of_gloo -= 1
                continue
            text = (prefix + line.rstrip(b"\r\n") + b"\n").decode(errors="replace")
            sys.stdout.write(text)  # one write a line, so that lines of two processes do not mix
            sys.stdout.flush()


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _guilt(code: int) -> int:
    """Of processes that died within one look, the lowest is the cause: jax ends what is left by SIGABRT or an error."""
    return 2 if code == -signal.SIGABRT else int(code > 0)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@contextlib.contextmanager
def _on_signals(action: Callable[[int], object]) -> Iterator[None]:
    """SIGTERM, SIGINT and the end of the terminal, unless nohup ignores it, call `action` meanwhile."""
    stopping = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        stopping.append(signal.SIGHUP)
    before = {which: signal.signal(which, lambda got, _: action(got)) for which in stopping}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
