"""Two hosts for torchrun, which are network namespaces of this one."""

from __future__ import annotations

import subprocess
import sys

# Two network namespaces with a wire between them. Commands of both hosts are in $1 and $2, and this
# script lives as long as the shorter of them.
TWO_HOSTS = """
set -e
ip link set lo up
unshare -n sleep 300 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add host0 type veth peer name host1 netns $other
ip addr add 10.93.0.1/24 dev host0
ip link set host0 up
enter="nsenter --preserve-credentials --net=/proc/$other/ns/net"
$enter ip link set lo up
$enter ip addr add 10.93.0.2/24 dev host1
$enter ip link set host1 up
eval "$enter $2" & second=$!
eval "$1"
wait $second
"""


def on_two_hosts(*torchrun: str) -> list[str]:
    """A command that runs torchrun with these arguments on both, and ends as the first does."""
    fixed = "--nnodes 2 --master-addr 10.93.0.1 --master-port 29517"
    runs = [
        f"{sys.executable} -m torch.distributed.run {fixed} --node-rank {rank} {' '.join(torchrun)}"
        for rank in range(2)
    ]
    return ["unshare", "-rn", "bash", "-c", TWO_HOSTS, "-", *runs]


def require_namespaces() -> None:
    probe = subprocess.run(
        ["unshare", "-rn", "bash", "-c", TWO_HOSTS, "-", "true", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert probe.returncode == 0, (
        "This machine does not let its user make two network namespaces and a wire between them, "
        f"so that two hosts cannot be shown on it: {probe.stderr.strip()}"
    )
