"""systemd's side of a service: sockets that it opened, and what it is told: ready, stopping, alive."""

import os
import socket
import time

FIRST = 3  # the descriptor after stdin, stdout and stderr


def notify(state: str) -> None:
    """Tell the supervisor ``READY=1`` and the like, by sd_notify(3)'s protocol; without one nothing happens.

    Nothing waits for a supervisor that does not listen, for this is called in the event loop: what cannot be sent at
    once is not sent.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:
        return


def describe_reload() -> str:
    """The state to send when a reload begins; ``READY=1`` ends it."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"


def watchdog_s() -> float | None:
    """Seconds between two signs of life, half of what the supervisor allows; None where it expects none."""
    wanted, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not wanted.isdecimal() or process != str(os.getpid()):
        return None
    return int(wanted) / 2e6


def inherit_sockets() -> list[socket.socket]:
    """Sockets that systemd listens on and hands over (sd_listen_fds(3)); none where this process was not meant."""
    given = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if given["LISTEN_PID"] != str(os.getpid()) or not given["LISTEN_FDS"].isdecimal():
        return []
    found = [socket.socket(fileno=FIRST + number) for number in range(int(given["LISTEN_FDS"]))]
    for one in found:
        one.set_inheritable(False)
    return found
