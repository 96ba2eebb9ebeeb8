"""How long a grant takes while fills run at full rate: one reader asks again and again for a resident extent."""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from cachesvc.catalog.build import Options
from cachesvc.client import Control
from cachesvc.grants import Granted
from cachesvc.leases import DaemonGrants


def measure(socket_dir: str, resident_uri: str, cold_uri: str, options: Options) -> tuple[float, float, int]:
    """Median and 99th percentile of a grant in seconds, and how many were timed while `cold_uri` was filled."""
    with Control(socket_dir) as control:
        warm = control.open_dataset([resident_uri], options)
        for _ in control.prefetch(warm.id):
            pass
        cold = control.open_dataset([cold_uri], options)
        grants = DaemonGrants(socket_dir, warm.id)
        times: list[float] = []
        filling = threading.Event()
        ended = threading.Event()

        def fill() -> None:
            for reply in control.prefetch(cold.id):
                if reply.resident_extents:
                    filling.set()
            ended.set()

        thread = threading.Thread(target=fill)
        thread.start()
        filling.wait(60)
        while not ended.is_set():
            started = time.perf_counter()
            (answer,) = grants.acquire([0], 5.0)
            times.append(time.perf_counter() - started)
            assert isinstance(answer, Granted)
            os.close(answer.fd)
            grants.release([0])
            time.sleep(0.0002)  # a reader asks now and then; this is no contest for the core
        thread.join()
        grants.close()
    return float(np.median(times)), float(np.quantile(times, 0.99)), len(times)
