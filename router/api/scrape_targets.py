"""Prometheus' HTTP service discovery: where the metrics of this router and of all its workers are.

The router answers for itself with the host by which it was asked. A worker is where the router dials it, at the port of
its metrics that it told; one that the router knows by a loopback address is on the router's machine, so whoever asks
reaches it by the router's host. Workers that have never answered are not known to have metrics.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import orjson

from router.workers.state import WorkerState

PATH = "/sd"


def scrape_targets(
    workers: Iterable[WorkerState],
    asked: str,
    *,
    other_ports: Iterable[int] = (),
    router_tls: bool = False,
    worker_tls: bool = False,
) -> bytes:
    """Target groups as JSON. `asked`: host:port by which the router's metrics port was reached.

    `other_ports`: where other processes of this router have theirs.
    Whose ports speak TLS, `router_tls` and `worker_tls`, is scraped by https.
    """
    own_host, _, _ = asked.rpartition(":")
    groups = [_group(asked, tls=router_tls, role="router")]
    groups += [_group(f"{own_host}:{port}", tls=router_tls, role="router") for port in other_ports]
    for worker in workers:
        facts = worker.facts
        if facts is None or not facts.metrics_port or worker.duplicate_of:
            continue
        host = worker.address.rpartition(":")[0]
        if own_host and _is_loopback(host):
            host = own_host
        target = f"{host}:{facts.metrics_port}"
        groups.append(_group(target, tls=worker_tls, role="worker", worker_id=facts.worker_id, model=facts.model.model))
    return orjson.dumps(groups)


def _group(target: str, *, tls: bool, **labels: str) -> dict[str, object]:
    return {"targets": [target], "labels": labels | ({"__scheme__": "https"} if tls else {})}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
