"""Runs a verb on every member of the cluster: `--cluster`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import click

from cachesvc.cli import output, resolve
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput, NotFound
from cachesvc.core.model import DatasetId

if TYPE_CHECKING:
    from cachesvc.catalog.options import Options
    from cachesvc.v1 import cachesvc_pb2 as pb

_T = TypeVar("_T")
AT_ONCE = 64
"""Members that are asked at a time: as many calls as a daemon takes on one connection."""

option = click.option(
    "--cluster",
    is_flag=True,
    help="On all members of the cluster, by way of this node's daemon. Exits 10 where one does not answer.",
)


@dataclass(slots=True)
class Answers(Generic[_T]):
    """The answers of members, and the errors of the others, by name. `absent`: the names of those that did not answer;
    `left`: those of them that said goodbye, which is no error."""

    found: dict[str, _T] = field(default_factory=dict)
    errors: dict[str, CacheError] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)

    def complain(self, as_json: bool) -> int:
        """Print the errors, each with the name of its node; return the exit code: 10 where a member did not answer, else
        that of the first error."""
        for node, error in self.errors.items():
            with output.of_node(node):
                output.complain(error, as_json)
        if self.left.issuperset(self.absent):
            return next((each.code for node, each in self.errors.items() if node not in self.left), 0)
        return DaemonUnavailable.code


class Cluster:
    """The members, as this node's daemon sees them. Context manager. Raises InvalidInput where the daemon is alone."""

    def __init__(self, socket: str | None) -> None:
        self.control = Control(socket)
        reply = self.control.nodes()
        self._nodes: Sequence[pb.NodeStatus] = reply.nodes
        if not reply.clustered:
            self.control.close()
            raise InvalidInput(
                "this daemon is alone; start it with --cluster to share extents with other nodes"
            )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()

    def ask(self, work: Callable[[Control], _T]) -> Answers[_T]:
        """Do something on each member, on threads. What it prints bears the name of that node."""
        open_controls, command = [self.control], click.get_current_context()

        def ask(node: pb.NodeStatus) -> _T | CacheError:
            with command.scope(cleanup=False), output.of_node(name_of(node)):
                try:
                    if node.me:
                        return work(self.control)
                    with Control(self.control.directory, name_of(node)) as control:
                        open_controls.append(control)
                        return work(control)
                except CacheError as error:
                    return error

        pool = ThreadPoolExecutor(min(AT_ONCE, len(self._nodes)), "member")
        try:
            found = list(pool.map(ask, self._nodes))
        except BaseException:  # Ctrl-C: the calls end, and with them the threads
            for each in open_controls:
                each.close()
            raise
        finally:
            pool.shutdown()
        return self._sorted(found)

    def versions(self, target: str, options: Options) -> list[DatasetId]:
        """Return the versions of a URI that any member knows, or the datasets of an id; where none is known, the current
        version, which this node opens."""
        known = self.ask(lambda control: resolve.known_versions(control, target))
        found = dict.fromkeys(each for ids in known.found.values() for each in ids)
        return list(found) or resolve.all_versions(self.control, target, options)

    def _sorted(self, found: Sequence[_T | CacheError]) -> Answers[_T]:
        answers = Answers[_T]()
        for node, each in zip(self._nodes, found, strict=True):
            name = name_of(node)
            if not isinstance(each, CacheError):
                answers.found[name] = each
                continue
            answers.errors[name] = each
            if each.code == DaemonUnavailable.code:
                answers.absent.append(name)
                if node.state == "left":
                    answers.left.add(name)
        return answers


def name_of(node: pb.NodeStatus) -> str:
    """Return the name of a member; the address of a node that is none, since its name may be another's."""
    return node.address if node.state in ("refused", "unknown") else node.name


def ask(
    socket: str | None, cluster: bool, work: Callable[[Control], _T], as_json: bool
) -> tuple[int, dict[str, _T]]:
    """Ask this node, whose name is then "", or all members; return the exit code and the answers by name. Raises the error
    of this node."""
    if not cluster:
        with Control(socket) as control:
            return 0, {"": work(control)}
    with Cluster(socket) as everyone:
        answers = everyone.ask(work)
    return answers.complain(as_json), answers.found


def run_versions(
    socket: str | None,
    cluster: bool,
    target: str,
    options: Options,
    work: Callable[[Control, Sequence[DatasetId]], None],
    as_json: bool,
) -> tuple[int, Sequence[DatasetId], Sequence[str]]:
    """Do something with every known version of a URI, or the dataset of an id: on this node, or on all members, each with
    the versions that it knows. Return the exit code, the versions, and the members that did not answer."""
    if not cluster:
        with Control(socket) as control:
            work(control, versions := resolve.all_versions(control, target, options))
        return 0, versions, ()
    with Cluster(socket) as everyone:
        versions = everyone.versions(target, options)

        def on_member(control: Control) -> None:
            failure: CacheError | None = None
            for dataset in versions:
                try:
                    work(control, [dataset])
                except NotFound:
                    row = {"event": "unknown", "dataset": dataset, "target": target}
                    output.report(as_json, f"{target} ({dataset}) is not known", row)
                except DaemonUnavailable:
                    raise
                except CacheError as error:
                    failure = failure or error
            if failure is not None:
                raise failure

        answers = everyone.ask(on_member)
    return answers.complain(as_json), versions, answers.absent
