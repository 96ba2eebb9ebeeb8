"""A node behind another address, of whose ports only some are open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from testbed import WAIT_S


@contextmanager
def forwarding(port: int) -> Iterator[None]:
    """Forward 127.0.0.2:PORT to 127.0.0.1:PORT."""
    with socket.create_server(("127.0.0.2", port)) as listener:

        def pump(origin: socket.socket, to: socket.socket) -> None:
            with suppress(OSError):
                while data := origin.recv(1 << 16):
                    to.sendall(data)
                to.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    near, _ = listener.accept()
                    try:
                        far = socket.create_connection(("127.0.0.1", port))
                    except OSError:  # the node does not listen yet
                        near.close()
                        continue
                    for one, other in ((near, far), (far, near)):
                        threading.Thread(target=pump, args=(one, other), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
