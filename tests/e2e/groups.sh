# Group snapshots, and hooks in pods.
# shellcheck shell=bash

# Restores each member of a group: the member of claim X into a claim restored-X.
restore_members() { # GROUP SIZE CLAIM...
    local of=$1 size=$2 name snap
    shift 2
    for name; do
        snap=$(members "$of" | awk -v claim="$name" '$2 == claim {print $1}')
        [ -n "$snap" ] || fail "group $of has no member of claim $name: $(members "$of")" || return 1
        claim "restored-$name" "$size" "$(get "pvc/$name" .spec.storageClassName)" "VolumeSnapshot/$snap"
    done
}
no_members() { [ -z "$(k get volumesnapshots -o name)" ] || fail "members are left"; }

# Checks that all members are of one instant: a writer wrote each number to a, then to b. So b never has a
# number that a lacks, and no log has a gap.
in_order() { # POD FILE_A FILE_B
    local a b
    a=$(inside "$1" "tail -n 1 $2") b=$(inside "$1" "tail -n 1 $3")
    for file in "$2" "$3"; do
        inside "$1" "awk 'NR != \$1 {print \"line\", NR, \"is\", \$1; exit 1}' $file" || fail "$file has a gap" || return 1
    done
    [ "$a" -gt 10 ] || fail "only $a writes in the cut" || return 1
    [ "$a" = "$b" ] || [ "$a" = $((b + 1)) ] || fail "a has $a, b has $b: not one instant" || return 1
    note "the cut has writes 1 to $a in a, 1 to $b in b"
}

has_note() { [ "$(get "$1" '.metadata.annotations.slackwater\.dev/level')" = filesystem ]; }

test_a_group_on_one_node_under_load() {
    LABELS='set: one' claim a 200Mi
    LABELS='set: one' claim b 200Mi
    pod writer -c 'i=0; while :; do i=$((i+1)); echo $i >> /a/log; echo $i >> /b/log; done' a:/a b:/b
    ready pod/writer
    local round
    for round in 1 2 3; do
        group "group-$round" one
        note "level: $(k get events --field-selector "involvedObject.name=group-$round" -o jsonpath='{.items[*].message}')"
    done
    local content
    content=volumegroupsnapshotcontent/$(get volumegroupsnapshot/group-2 .status.boundVolumeGroupSnapshotContentName)
    eventually 60 has_note "$content"
    restore_members group-2 200Mi a b
    pod reader restored-a:/a restored-b:/b
    ready pod/reader
    in_order reader /a/log /b/log
    is "creation times of the members" "$(members group-2 | awk '{print $3}' | sort -u | wc -l)" 1
    gone volumegroupsnapshot --all
    eventually 60 no_members
    note "its members were deleted with it"
}

test_a_group_across_two_nodes_under_load() {
    two_nodes
    LABELS='set: two' claim a 200Mi
    LABELS='set: two' claim b 200Mi
    # b's pod writes what a's pod sends, and answers; a's pod then sends the next.
    pod far -n "$NODE_2" -c 'nc -ll -p 7000 -e sh -c "while read i; do echo \$i >> /b/log; echo \$i; done"' b:/b
    ready pod/far
    local ip
    ip=$(get pod/far .status.podIP)
    pod near -n "$NODE_1" -c "mkfifo /tmp/to /tmp/from; until nc $ip 7000 < /dev/null; do sleep 1; done; nc $ip 7000 < /tmp/to > /tmp/from & exec 3> /tmp/to 4< /tmp/from; i=0; while :; do i=\$((i+1)); echo \$i >> /a/log; echo \$i >&3; read j <&4 || exit; done" a:/a
    ready pod/near
    eventually 30 inside far '[ $(wc -l < /b/log) -gt 20 ]'
    local round
    for round in 1 2 3; do group "group-$round" two; done
    restore_members group-3 200Mi a b
    pod reader-a -n "$NODE_1" restored-a:/a
    pod reader-b -n "$NODE_2" restored-b:/b
    ready pod/reader-a pod/reader-b
    local a b
    a=$(inside reader-a 'tail -n 1 /a/log') b=$(inside reader-b 'tail -n 1 /b/log')
    [ "$a" -gt 10 ] || fail "only $a writes in the cut" || return 1
    [ "$a" = "$b" ] || [ "$a" = $((b + 1)) ] || fail "a has $a, b has $b: not one instant" || return 1
    inside reader-a "awk 'NR != \$1 {exit 1}' /a/log" && inside reader-b "awk 'NR != \$1 {exit 1}' /b/log" || fail "a gap" || return 1
    note "the cut has writes 1 to $a on $NODE_1, 1 to $b on $NODE_2"
    # Both still write, so nothing has stayed frozen.
    eventually 30 inside far "[ \$(wc -l < /b/log) -gt $((b + 20)) ]"
}

# Permits hooks in this test's namespace, as its owner would do.
allow_hooks() {
    k create rolebinding slackwater-hooks --clusterrole=slackwater-hooks --serviceaccount=$SYSTEM:slackwater-controller >/dev/null
}
snapshot_class() { # NAME KEY VALUE...
    local name=$1 parameters=''
    shift
    while [ $# -gt 0 ]; do parameters+="$1: \"$2\", "; shift 2; done
    kubectl apply -f - >/dev/null <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: $name, labels: {slackwater-e2e: "yes"}}
driver: $DRIVER
deletionPolicy: Delete
parameters: {${parameters%, }}
END
}
snapshot_of_class() { # NAME CLAIM CLASS
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec: {volumeSnapshotClassName: $3, source: {persistentVolumeClaimName: $2}}
END
}

test_a_hook_in_a_pod_quiesces_it() {
    kubectl get clusterrole slackwater-hooks >/dev/null 2>&1 || { note "no router in this installation: no hooks in pods"; exit 77; }
    allow_hooks
    snapshot_class e2e-application consistency application
    claim data 100Mi
    # Its files are consistent only between two rounds, and while a hook holds it.
    ANNOTATIONS='hooks.slackwater.dev/session: "[\"sh\", \"-c\", \"touch /tmp/hold; until [ -e /tmp/held ]; do sleep 0.05; done; echo READY; timeout {seconds} cat > /dev/null; echo x >> /tmp/times; rm /tmp/hold\"]"' \
        pod app -c 'while :; do if [ -e /tmp/hold ]; then touch /tmp/held; sleep 0.05; continue; fi; rm -f /tmp/held; echo broken > /v/state; sleep 0.5; echo whole > /v/state; done' data:/v
    ready pod/app
    local i
    for i in 1 2 3; do
        snapshot_of_class "snap-$i" data e2e-application
        until_field "volumesnapshot/snap-$i" .status.readyToUse true
        claim "restored-$i" 100Mi slackwater "VolumeSnapshot/snap-$i"
    done
    is "the hook's runs" "$(inside app 'wc -l < /tmp/times')" 3
    pod reader restored-1:/v1 restored-2:/v2 restored-3:/v3
    ready pod/reader
    for i in 1 2 3; do is "restore $i" "$(inside reader "cat /v$i/state")" whole; done
    eventually 30 inside app '[ ! -e /tmp/hold ]'
    note "it continues"
}

test_a_hook_that_fails_is_told_and_not_run_again_and_again() {
    kubectl get clusterrole slackwater-hooks >/dev/null 2>&1 || { note "no router in this installation: no hooks in pods"; exit 77; }
    allow_hooks
    snapshot_class e2e-fails consistency application retries 1 retryInterval 1s
    claim data 100Mi
    ANNOTATIONS='hooks.slackwater.dev/session: "[\"sh\", \"-c\", \"echo x >> /tmp/times; echo the database is busy >&2; exit 3\"]"' pod app data:/v
    ready pod/app
    snapshot_of_class snap data e2e-fails
    told() { get volumesnapshot/snap .status.error.message | grep -q busy; }
    eventually 120 told
    note "the snapshot says: $(get volumesnapshot/snap .status.error.message)"
    sleep 30
    is "ready" "$(get volumesnapshot/snap .status.readyToUse)" false
    local times
    times=$(inside app 'wc -l < /tmp/times')
    [ "$times" -ge 2 ] && [ "$times" -le 8 ] || fail "the hook ran $times times" || return 1
    note "the hook ran $times times"
}

# One hook never prints READY, and one ends immediately after it; the class accepts a lower level.
test_a_hook_that_hangs_or_dies_costs_the_level_alone() {
    kubectl get clusterrole slackwater-hooks >/dev/null 2>&1 || { note "no router in this installation: no hooks in pods"; exit 77; }
    allow_hooks
    snapshot_class e2e-lower consistency application onQuiesceFailure filesystem retries 0
    local which
    for which in hangs dies; do
        claim $which 100Mi
        # shellcheck disable=SC2034 # `pod` reads it
        case $which in
        hangs) ANNOTATIONS='hooks.slackwater.dev/timeout: 5s, hooks.slackwater.dev/session: "[\"sh\", \"-c\", \"cat > /dev/null\"]"' ;;
        dies) ANNOTATIONS='hooks.slackwater.dev/session: "[\"sh\", \"-c\", \"echo READY\"]"' ;;
        esac
        pod $which -c 'i=0; while :; do i=$((i+1)); echo $i > /v/n; sync; sleep 0.1; done' $which:/v
        unset ANNOTATIONS
    done
    ready pod/hangs pod/dies
    for which in hangs dies; do
        snapshot_of_class $which $which e2e-lower
        until_field "volumesnapshot/$which" .status.readyToUse true
        told() { k get events --field-selector "involvedObject.name=$which" -o jsonpath='{.items[*].message}' | grep -q filesystem; }
        eventually 60 told
        note "of the hook that $which: $(k get events --field-selector "involvedObject.name=$which,involvedObject.kind=VolumeSnapshot" -o jsonpath='{.items[*].message}')"
    done
    local n
    n=$(inside hangs 'cat /v/n')
    eventually 30 inside hangs "[ \$(cat /v/n) -gt $((n + 10)) ]"
    note "both continue"
}
