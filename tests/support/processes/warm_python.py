"""`run`: a script in a process of its own, as ``python -c`` runs it, but torch is there already.

A server has torch loaded, and forks itself for every script. The forked process has no thread but its first,
becomes ``__main__``, and ends as an interpreter does: exit handlers, threads and all.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PRELOADED = ("numpy", "msgspec", "torch", "torch._dynamo")

_SERVER = f"""
import json, os, signal, socket, sys
{"".join(f"import {name};" for name in PRELOADED)}
def serve():
    # Returns in the forked processes only, with what each is to do.
    server = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            server.close()
            for place, descriptor in enumerate(descriptors):
                os.dup2(descriptor, place)
            os.closerange(3, 256)
            return json.loads(data)
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(b"%d" % pid)
        server.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
order = serve()
sys.argv[:] = ["-c", *order["arguments"]]
os.environ.clear()
os.environ.update(order["environment"])
os.chdir(order["folder"])
sys.path[:] = ["", *order["path"]]
exec(compile(order["script"], "<string>", "exec"), {{"__name__": "__main__", "__builtins__": __builtins__}})
"""


@functools.cache
def _server(owner: int) -> socket.socket:
    """One for each process that tests run in (`owner`)."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", _SERVER, str(its.fileno())]
    server = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    atexit.register(lambda: (mine.close(), server.wait()))
    return mine


def run(
    script: str, *arguments: object, timeout: float, cwd: Path | None = None, env: Any = None
) -> subprocess.CompletedProcess[str]:
    """The script's end and what it printed. One that takes too long is killed: `TimeoutExpired`."""
    server = _server(os.getpid())
    order = {
        "script": script,
        "arguments": list(map(str, arguments)),
        "environment": dict(os.environ if env is None else env),
        "folder": os.fspath(cwd or os.getcwd()),
        "path": [path for path in sys.path if path],
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        socket.send_fds(server, [json.dumps(order).encode()], [nothing.fileno(), out.fileno(), err.fileno()])
        server.settimeout(timeout)
        pid = int(server.recv(64))
        try:
            code = int(server.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.settimeout(timeout)
            server.recv(64)
            raise subprocess.TimeoutExpired(script, timeout) from None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([*order["arguments"]], code, *texts)
