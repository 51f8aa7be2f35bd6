# Settings and helpers shared by the cluster scripts; sourced, not run.
# shellcheck shell=bash disable=SC2034 # variables are for the scripts that source this
set -euo pipefail

LAB=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${CLUSTER_CACHE:-$HOME/.cache/slackwater-cluster}  # what was built: used again
STATE=${CLUSTER_STATE:-$CACHE/state}              # the running cluster: removed by down
NET=${CLUSTER_NET:-10.199.0}                      # first three bytes of the nodes' /24
POD_NET=${CLUSTER_POD_NET:-10.244}                # pods of node N: $POD_NET.N.0/24
SERVICE_NET=${CLUSTER_SERVICE_NET:-10.96}         # services: $SERVICE_NET.0.0/16
BRIDGE=${CLUSTER_BRIDGE:-testcluster0}
DISK=${CLUSTER_DISK-20G}                          # each node's disk for a pool; empty: none
DISK_AT=/var/lib/slackwater/pool                  # where a node mounts it
BIN=$CACHE/bin
export PATH=$BIN:$PATH:/usr/local/go/bin:/usr/sbin:/sbin
export KUBECONFIG=$STATE/kubeconfig

say() { printf '%s cluster: %s\n' "$(date +%T)" "$*" >&2; }
die() { say "$*"; exit 1; }

node_name() { echo "node-$1"; }
node_ip() { echo "$NET.$((10 + $1))"; }
node_dir() { echo "$STATE/node-$1"; }
node_netns() { echo "testcluster-$1"; }

# The node's first process as this (host) PID namespace numbers it, if it lives.
node_pid() {
    local f pid start
    f=$(node_dir "$1")/pid
    [ -s "$f" ] || return 1
    read -r pid start <"$f"
    [ -n "$start" ] && [ "$(start_time "$pid")" = "$start" ] || return 1
    echo "$pid"
}

# When a process started, in clock ticks since boot: with its number it names
# one process, however often numbers are used again.
start_time() { { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null || :; } | cut -d' ' -f20; }

# Runs a command in all the namespaces of node N.
in_node() {
    local pid
    pid=$(node_pid "$1") || die "node $1 is not running"
    shift
    nsenter --target "$pid" --mount --uts --ipc --net --pid --wd=/ -- "$@"
}

# Numbers of the nodes that this state knows of.
known_nodes() {
    local d
    for d in "$STATE"/node-*; do
        [ -d "$d" ] && echo "${d##*-}"
    done | sort -n
}

# The version that the tools module (or the given go.mod) pins for a module.
module_version() {
    awk -v m="$1" '$1 == "require" { sub("^require ", "") } $1 == m && $2 ~ /^v/ { print $2; exit }' "${2:-$LAB/tools/go.mod}"
}

# What there is of images: nodes that have loaded it need no other.
images_there() {
    cat "$CACHE/stamp"
    find "$STATE/images" -name '*.tar' -exec sha256sum {} + 2>/dev/null | sort || :
}
