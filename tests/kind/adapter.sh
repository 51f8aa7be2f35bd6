# A cluster of kind (https://kind.sigs.k8s.io) as the end-to-end tests see it; sourced by tests/e2e/lib.sh.
# This has not been run: it was written on a machine without a Docker daemon. tests/cluster/adapter.sh
# describes the functions. A node is a container; `up` starts the cluster.
# shellcheck shell=bash disable=SC2034 # variables are for the scripts that source this

STATE=${KIND_STATE:-$HOME/.cache/slackwater-kind}
KIND_NAME=slackwater
POOL_AT=/var/lib/slackwater/pool
START="make image && tests/kind/up"
export KUBECONFIG=${KUBECONFIG:-$STATE/kubeconfig} PATH=$PATH:/usr/sbin:/sbin

# (Without standard input, which is often a list that the caller reads.)
node_exec() { docker exec "$(node_name "$1")" "${@:2}"; }
node_start() {
    docker start "$(node_name "$1")" >/dev/null
    # The kubelet's unit mounts the disk before it starts.
    timeout 120 sh -c "until docker exec $(node_name "$1") systemctl is-active --quiet containerd kubelet; do sleep 1; done"
}
node_stop() {
    docker kill "$(node_name "$1")" >/dev/null
    detach_loops "$(node_disk "$1")"
}
# The container stays, with the images that it has; everything of Kubernetes and of the driver goes.
node_replace() {
    [ "$1" != 1 ] || { echo "node 1 has the control plane: it cannot be replaced" >&2; return 1; }
    [ "$(node_list | awk -v n="$1" '$1 == n {print $3}')" = stopped ] || node_stop "$1"
    [ "${2:-}" != --blank ] || make_disk "$1"
    docker start "$(node_name "$1")" >/dev/null
    node_exec "$1" sh -euc "
        until systemctl is-active --quiet containerd; do sleep 1; done
        kubeadm reset --force
        umount $POOL_AT || true
        rm -rf --one-file-system /var/lib/slackwater /run/slackwater
        kubeadm join --config /kind/kubeadm.conf --skip-phases=preflight" >/dev/null
}
node_list() {
    local n state
    for ((n = 1; ; n++)); do
        state=$(docker inspect --format '{{.State.Running}}' "$(node_name "$n")" 2>/dev/null) || return 0
        if [ "$state" = true ]; then state=running; else state=stopped; fi
        echo "$n $(node_name "$n") $state"
    done
}

node_name() {
    case $1 in
    1) echo "$KIND_NAME-control-plane" ;;
    2) echo "$KIND_NAME-worker" ;;
    *) echo "$KIND_NAME-worker$(($1 - 1))" ;;
    esac
}
node_disk() { echo "$STATE/node-$1/disk.img"; } # ($STATE is mounted in all nodes)
load_image() { kind load image-archive --name "$KIND_NAME" "$1"; }
provide_database() { :; } # (nodes pull upstream's images)

# make_disk N: a blank one.
make_disk() {
    local disk
    disk=$(node_disk "$1")
    mkdir -p "$(dirname "$disk")"
    rm -f "$disk"
    truncate --size=20G "$disk"
    mkfs.xfs -q "$disk"
}

# detach_loops FILE: the loop devices of the machine on a file, on files of the file system in it (images
# of volumes), and on those themselves (the kubelet's, of raw block volumes). They survive the container.
detach_loops() {
    local device other
    for device in $(losetup --noheadings --output NAME --associated "$1"); do
        for other in $(losetup --noheadings --raw --output NAME,BACK-MAJ:MIN |
            awk -v on="$(cat "/sys/block/${device#/dev/}/dev")" '$2 == on {print $1}'); do
            losetup --noheadings --output NAME --associated "$other" | xargs --no-run-if-empty losetup --detach
            losetup --detach "$other"
        done
        losetup --detach "$device" || : # (it may go by itself)
    done
}
