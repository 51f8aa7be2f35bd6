# A load, and what is asked meanwhile; sourced by lib.sh. Tests kill, cut and replace beneath it.
# shellcheck shell=bash

# writer [NODE]: a pod that writes numbers, each synced, and says which it has written: what was
# acknowledged. It also keeps its longest pause, in hundredths of a second.
writer() {
    class e2e-xfs csi.storage.k8s.io/fstype xfs
    LABELS='set: load' claim load 400Mi e2e-xfs
    # shellcheck disable=SC2016
    pod load ${1:+-n "$1"} -c 'uptime() { read t x < /proc/uptime; t=${t%.*}${t#*.}; }; i=$(cat /v/n 2>/dev/null || echo 0); uptime; l=$t; m=0; while :; do i=$((i+1)); echo $i > /v/n.new && sync /v/n.new && mv /v/n.new /v/n || { echo broken; exit; }; echo $i > /tmp/said.new; mv /tmp/said.new /tmp/said; uptime; [ $((t-l)) -le $m ] || { m=$((t-l)); echo $m > /tmp/pause; }; l=$t; done' load:/v
    ready pod/load
    eventually 60 inside load '[ $(cat /tmp/said) -gt 5 ]'
    WRITER=$(get pod/load .metadata.uid)
}
# It still writes, in the same pod, which was never started again; what it said is there.
writes_on() {
    local n pause
    # (a kubelet that was killed is back in a moment)
    eventually 60 inside load true
    n=$(inside load 'cat /tmp/said')
    eventually 90 inside load "[ \$(cat /tmp/said) -gt $((n + 5)) ]" || fail "writes stand still at $n" || return 1
    [ "$(get pod/load .metadata.uid)" = "$WRITER" ] || fail "the writer's pod is another" || return 1
    is "restarts of the writer's pod" "$(get pod/load '.status.containerStatuses[0].restartCount')" 0
    inside load 's=$(cat /tmp/said); [ "$(cat /v/n)" -ge "$s" ]' || fail "the volume lacks what was acknowledged" || return 1
    pause=$(inside load 'cat /tmp/pause')
    note "the writer went from $n to $(inside load 'cat /tmp/said'); its longest pause: $((pause / 100)).$(printf %02d $((pause % 100))) s"
}

# Claims with pods, and snapshots of the load, asked for and not waited for.
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
withdraw() { # ROUND: not waited for
    k delete --wait=false pod "r$1-1" "r$1-2" "r$1-3" >/dev/null
    k delete --wait=false pvc "r$1-1" "r$1-2" "r$1-3" >/dev/null
    k delete --wait=false volumesnapshot "r$1-1" "r$1-2" "r$1-3" >/dev/null
}
# A number that was acknowledged before a snapshot was asked for is in its restore.
restored_has() { # SNAPSHOT NUMBER
    claim "restored-$1" 400Mi e2e-xfs "VolumeSnapshot/$1"
    pod "restored-$1" "restored-$1:/v"
    ready "pod/restored-$1"
    local n
    n=$(inside "restored-$1" 'cat /v/n')
    [ "$n" -ge "$2" ] || fail "the restore of $1 has $n, and $2 was written before" || return 1
    note "the restore of $1 has $n; $2 was written before it was asked for"
}

# Nothing is journalled as frozen on any node, once the longest freeze has ended.
nothing_frozen() {
    local n
    for n in $(running); do
        eventually 30 node "$n" sh -c '[ -z "$(find /run/slackwater/state/freezes -type f 2>/dev/null)" ]' || fail "frozen on node $n" || return 1
    done
    note "nothing is frozen on any node"
}
