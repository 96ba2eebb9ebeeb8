"""Keeps multiprocessing's fork server alive at the signals of `group_signals`: its workers would count as dead without it.

The fork server imports this module when it starts (`set_forkserver_preload`), and nothing else does. The processes that it
forks have the default actions again: they may be any program's.
"""

from __future__ import annotations

import os
import signal

from cachesvc.system.group_signals import GROUP_SIGNALS, outlive_group_signals, stay


def _restore_defaults() -> None:
    for number in GROUP_SIGNALS:
        if signal.getsignal(number) is stay:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_defaults)
outlive_group_signals()
