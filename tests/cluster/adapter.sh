# The cluster of this directory as the end-to-end tests see it; sourced by tests/e2e/lib.sh. The suites use
# nodes, images and disks only through these functions, so that they also run on another cluster: one
# whose adapter has the same functions (E2E_CLUSTER=kind: tests/kind/adapter.sh).
# shellcheck shell=bash disable=SC2034 # variables are for the scripts that source this

LABORATORY=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${CLUSTER_CACHE:-$HOME/.cache/slackwater-cluster}
STATE=${CLUSTER_STATE:-$CACHE/state}
START="make cluster"
export KUBECONFIG=${KUBECONFIG:-$STATE/kubeconfig} PATH=$CACHE/bin:$PATH:/usr/sbin:/sbin

# node_exec N COMMAND...: runs a command in all namespaces of node N. Node 1 has the control plane.
node_exec() { "$LABORATORY/node" exec "$@"; }
# node_start N: boots a node that was stopped.
node_start() { "$LABORATORY/node" start "$1"; }
# node_stop N: a power cut. All processes are killed, mounts and network go, the disk stays.
node_stop() { "$LABORATORY/node" stop "$1"; }
# node_replace N [--blank]: another machine takes the name, with the old disk or a blank one, and boots.
node_replace() { "$LABORATORY/node" replace "$@"; }
# node_list: number, name in Kubernetes, and `running` or `stopped` of each node.
node_list() { "$LABORATORY/node" list | awk '{print substr($1, 6), $1, $3 == "stopped" ? $3 : "running"}'; }

# node_name N: its name in Kubernetes.
node_name() { echo "node-$1"; }
# node_disk N: the file on this machine, also visible in all nodes, that is the disk of a node's pool.
node_disk() { echo "$STATE/node-$1/disk.img"; }
# load_image ARCHIVE: into all nodes.
load_image() { "$LABORATORY/image" load "$1"; }
# provide_database postgresql|mariadb|redis: the nodes have its image, or can pull it.
provide_database() { "$LABORATORY/databases" "$1"; }
