# A load, and requests during it; sourced by lib.sh. Tests kill processes, cut networks and replace nodes
# below it.
# shellcheck shell=bash

# writer [NODE]: a pod that writes numbers, syncs each, and then records it as acknowledged. It also
# records its longest pause, in hundredths of a second.
writer() {
    class e2e-xfs csi.storage.k8s.io/fstype xfs
    LABELS='set: load' claim load 400Mi e2e-xfs
    # shellcheck disable=SC2016
    pod load ${1:+-n "$1"} -c 'uptime() { read t x < /proc/uptime; t=${t%.*}${t#*.}; }; i=$(cat /v/n 2>/dev/null || echo 0); uptime; l=$t; m=0; while :; do i=$((i+1)); echo $i > /v/n.new && sync /v/n.new && mv /v/n.new /v/n || { echo broken; exit; }; echo $i > /tmp/said.new; mv /tmp/said.new /tmp/said; uptime; [ $((t-l)) -le $m ] || { m=$((t-l)); echo $m > /tmp/pause; }; l=$t; done' load:/v
    ready pod/load
    eventually 60 inside load '[ $(cat /tmp/said) -gt 5 ]'
    WRITER=$(get pod/load .metadata.uid)
}
# Checks that it still writes, in the same pod, whose containers were never restarted, and that the volume
# has what was acknowledged.
writes_on() {
    local n pause
    # (a kubelet that was killed is restarted in a moment)
    eventually 60 inside load true
    n=$(inside load 'cat /tmp/said')
    eventually 90 inside load "[ \$(cat /tmp/said) -gt $((n + 5)) ]" || fail "writes stopped at $n" || return 1
    [ "$(get pod/load .metadata.uid)" = "$WRITER" ] || fail "the writer's pod was replaced" || return 1
    is "restarts of the writer's pod" "$(get pod/load '.status.containerStatuses[0].restartCount')" 0
    inside load 's=$(cat /tmp/said); [ "$(cat /v/n)" -ge "$s" ]' || fail "the volume lacks what was acknowledged" || return 1
    pause=$(inside load 'cat /tmp/pause')
    note "the writer went from $n to $(inside load 'cat /tmp/said'); its longest pause: $((pause / 100)).$(printf %02d $((pause % 100))) s"
}

# block_writer: the same on a raw block volume. A pod writes one number after the other to the first
# sector, synced, and keeps the last number that the device has acknowledged.
block_writer() {
    MODE=Block claim disk 64Mi
    # shellcheck disable=SC2016
    pod disk -c 'i=0; while :; do i=$((i+1)); printf "%-511s\n" $i | dd of=/dev/disk bs=512 conv=fsync 2>/dev/null || { echo broken; exit; }; echo $i > /tmp/said.new; mv /tmp/said.new /tmp/said; sleep 0.1; done' disk:/dev/disk
    ready pod/disk
    eventually 60 inside disk '[ $(cat /tmp/said) -gt 5 ]'
    BLOCK_WRITER=$(get pod/disk .metadata.uid)
}
# The block writer still writes, in the same pod and container, and the device has what was acknowledged.
block_writes_on() {
    local n
    eventually 60 inside disk true
    n=$(inside disk 'cat /tmp/said')
    eventually 90 inside disk "[ \$(cat /tmp/said) -gt $((n + 5)) ]" || fail "writes to the raw block volume stopped at $n" || return 1
    [ "$(get pod/disk .metadata.uid)" = "$BLOCK_WRITER" ] || fail "the block writer's pod was replaced" || return 1
    is "restarts of the block writer's pod" "$(get pod/disk '.status.containerStatuses[0].restartCount')" 0
    inside disk 's=$(cat /tmp/said); n=$(dd if=/dev/disk bs=512 count=1 iflag=direct 2>/dev/null || dd if=/dev/disk bs=512 count=1 2>/dev/null); [ "$((n))" -ge "$s" ]' || fail "the raw block volume lacks what was acknowledged" || return 1
    note "the block writer went from $n to $(inside disk 'cat /tmp/said')"
}

# Requests claims with pods, and snapshots of the load, without waiting.
ask() { # ROUND
    local i
    for i in 1 2 3; do
        claim "r$1-$i" 310Mi e2e-xfs
        pod "r$1-$i" "r$1-$i:/v"
        snapshot_of "r$1-$i" load
    done
}
answered() { # ROUND
    local i
    for i in 1 2 3; do
        ready "pod/r$1-$i" || return 1
        until_field "volumesnapshot/r$1-$i" .status.readyToUse true || return 1
    done
    note "round $1: three claims with pods, three snapshots"
}
withdraw() { # ROUND: deletes them, without waiting
    k delete --wait=false pod "r$1-1" "r$1-2" "r$1-3" >/dev/null
    k delete --wait=false pvc "r$1-1" "r$1-2" "r$1-3" >/dev/null
    k delete --wait=false volumesnapshot "r$1-1" "r$1-2" "r$1-3" >/dev/null
}
# A number that was acknowledged before a snapshot was requested is in its restore.
restored_has() { # SNAPSHOT NUMBER
    claim "restored-$1" 400Mi e2e-xfs "VolumeSnapshot/$1"
    pod "restored-$1" "restored-$1:/v"
    ready "pod/restored-$1"
    local n
    n=$(inside "restored-$1" 'cat /v/n')
    [ "$n" -ge "$2" ] || fail "the restore of $1 has $n, and $2 was written before" || return 1
    note "the restore of $1 has $n; $2 was written before the request"
}

# Once the longest freeze has ended, no journal of a node has an entry.
nothing_frozen() {
    local n
    for n in $(running); do
        eventually 30 node_exec "$n" sh -c '[ -z "$(find /run/slackwater/state/freezes -type f 2>/dev/null)" ]' || fail "frozen on node $n" || return 1
    done
    note "nothing is frozen on any node"
}
