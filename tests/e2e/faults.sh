# What is killed under load: afterwards everything converges, nothing is lost, leaked or frozen.
# shellcheck shell=bash

# kill_on NODE SIGNAL PATTERN: processes of a node whose command line has it.
kill_on() { node "$1" pkill "-$2" -f "$3" || true; }
# The processes of the driver, by their command lines.
AGENT='^/usr/local/bin/slackwater serve .*--role=(node|all)'
ROUTER='^/usr/local/bin/slackwater serve .*--role=controller'
GUARD='^/usr/local/bin/slackwater guard'
running() { seq "$(nodes)"; }

# A pod that writes numbers, each synced, and says which it has written: what was acknowledged.
writer() {
    class e2e-xfs csi.storage.k8s.io/fstype xfs
    LABELS='set: load' claim load 400Mi e2e-xfs
    pod load -c 'i=$(cat /v/n 2>/dev/null || echo 0); while :; do i=$((i+1)); echo $i > /v/n.new && sync /v/n.new && mv /v/n.new /v/n || { echo broken; exit; }; echo $i > /tmp/said.new; mv /tmp/said.new /tmp/said; done' load:/v
    ready pod/load
    eventually 60 inside load '[ $(cat /tmp/said) -gt 5 ]'
}
# It still writes, in the same pod.
writes_on() {
    local n
    n=$(inside load 'cat /tmp/said')
    eventually 90 inside load "[ \$(cat /tmp/said) -gt $((n + 5)) ]" || fail "writes stand still at $n" || return 1
    is "restarts of the writer's pod" "$(get pod/load '.status.containerStatuses[0].restartCount')" 0
    note "the writer went from $n to $(inside load 'cat /tmp/said')"
}
# Claims with pods, and snapshots of the load, asked for and not waited for.
ask() { # ROUND
    local i
    for i in 1 2 3; do
        claim "r$1-$i" 310Mi e2e-xfs
        pod "r$1-$i" "r$1-$i:/v"
        apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: r$1-$i}
spec: {volumeSnapshotClassName: slackwater, source: {persistentVolumeClaimName: load}}
END
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
withdraw() { # ROUND: half of it is deleted while something is killed
    k delete --wait=false pod "r$1-1" "r$1-2" "r$1-3" >/dev/null
    k delete --wait=false pvc "r$1-1" "r$1-2" "r$1-3" >/dev/null
    k delete --wait=false volumesnapshot "r$1-1" "r$1-2" "r$1-3" >/dev/null
}
# Each round asks, kills while it is answered, and withdraws; the last one under a kill as well.
killed_again_and_again() { # SIGNAL PATTERN
    local round n
    writer
    for round in 1 2 3; do
        ask $round
        for n in $(running); do sleep 1; kill_on "$n" "$1" "$2"; done
        answered $round || return 1
        withdraw $round
    done
    # (not in each round: a container that ends often waits for minutes before it is started again)
    for n in $(running); do sleep 0.5; kill_on "$n" "$1" "$2"; done
    writes_on
}

test_agents_killed() { killed_again_and_again KILL "$AGENT"; }
test_guards_killed() { killed_again_and_again KILL "$GUARD"; }
test_agents_and_guards_killed_together() { killed_again_and_again KILL '^/usr/local/bin/slackwater (guard|serve .*--role=(node|all))'; }
test_routers_killed() {
    [ -n "$(kubectl -n $SYSTEM get deployment -o name)" ] || { note "no router in this installation"; exit 77; }
    killed_again_and_again KILL "$ROUTER"
}
test_sidecars_killed() { killed_again_and_again KILL '^/csi-(provisioner|attacher|resizer|snapshotter)'; }
test_kubelets_killed() { killed_again_and_again KILL '^kubelet --config'; }

test_no_api_server_for_a_minute() {
    writer
    ask 1
    sleep 1
    kill_on 1 STOP '^kube-apiserver '
    # (no kubectl meanwhile)
    sleep 60
    kill_on 1 CONT '^kube-apiserver '
    eventually 120 kubectl get --raw /readyz
    note "the API server answers again"
    answered 1
    withdraw 1
    writes_on
}

# The pod of a node's driver goes by force while groups are cut: nothing stays frozen, nothing is kept
# that isn't whole.
test_node_pods_deleted_by_force_while_groups_are_cut() {
    writer
    local i
    for i in 1 2 3; do
        apply <<END
apiVersion: groupsnapshot.storage.k8s.io/$(kubectl api-versions | sed -n 's/^groupsnapshot.storage.k8s.io.//p' | sort | tail -1)
kind: VolumeGroupSnapshot
metadata: {name: g$i}
spec: {volumeGroupSnapshotClassName: slackwater, source: {selector: {matchLabels: {set: load}}}}
END
        kubectl -n $SYSTEM delete pod -l app.kubernetes.io/component=node --force --grace-period=0 --wait=false >/dev/null 2>&1
        until_field "volumegroupsnapshot/g$i" .status.readyToUse true
        note "group $i is ready"
    done
    writes_on
    gone volumegroupsnapshot --all
}
