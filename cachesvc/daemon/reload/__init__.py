"""Takes changed settings into the running daemon.

In: a signal, a call, or a changed file. Out: the settings, resolved anew by `cachesvc config show`, in the parts that can
change, and one event. It owns what "the last reload" was.
"""
