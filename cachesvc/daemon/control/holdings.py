"""Tells how much of a dataset each member of the cluster holds."""

from __future__ import annotations

from cachesvc.core.node.node import Node
from cachesvc.daemon.control.reports import dataset_message
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.v1 import cachesvc_pb2 as pb


def where(dataset: ServedDataset, node: Node, cluster: ClusterLink) -> pb.WhereReply:
    """Ask all members. Runs on the threads of the calls."""
    found = cluster.holders(dataset.extent_ids)
    report = cluster.report
    own = bytes(node.where(extent) is not None for extent in dataset.extent_ids)
    nodes = []
    for row in report.rows:
        me = row.name == report.me
        held = own if me else found.held.get(row.name)
        message = pb.NodeHolding(name=row.name, address=row.address, zone=row.zone, me=me)
        if held is None:
            message.why = found.failed.get(row.name) or row.why or f"it is {row.state}"
        else:
            sizes = [size for size, here in zip(dataset.sizes, held) if here]
            message.resident_bytes, message.resident_extents = sum(sizes), len(sizes)
        nodes.append(message)
    nodes.sort(key=lambda each: (bool(each.why), -each.resident_bytes, each.name))
    return pb.WhereReply(dataset=dataset_message(dataset), nodes=nodes)
