# Processes are killed, and connections are cut, under load. Afterwards everything converges, and nothing is
# lost, leaked or frozen.
# shellcheck shell=bash

# kill_on NODE SIGNAL PATTERN: processes of a node whose command line has it; counted in KILLED.
KILLED=0
kill_on() {
    local n
    n=$(node_exec "$1" pkill --count "-$2" -f "$3") || :
    KILLED=$((KILLED + ${n:-0}))
}
SIDECARS='^/csi-(provisioner|attacher|resizer|snapshotter) '
routers() { [ -n "$(kubectl -n $SYSTEM get deployment -o name)" ] || { note "no router in this installation"; exit 77; }; }

# Each round makes requests, kills while they are answered, and deletes what it requested; in the last round,
# kills happen during the deletion too.
killed_again_and_again() { # SIGNAL PATTERN
    local round n said
    writer
    for round in 1 2; do
        said=$(inside load 'cat /tmp/said')
        ask $round
        for n in $(running); do sleep 1; kill_on "$n" "$1" "$2"; done
        answered $round || return 1
        [ $round != 2 ] || restored_has "r$round-3" "$said" || return 1
        withdraw $round
    done
    for n in $(running); do sleep 0.5; kill_on "$n" "$1" "$2"; done
    [ "$KILLED" -ge 3 ] || fail "only $KILLED were killed" || return 1
    note "killed: $KILLED"
    writes_on
    nothing_frozen
}

test_agents_killed() { killed_again_and_again KILL "$AGENT"; }
test_guards_killed() { killed_again_and_again KILL "$GUARD"; }
test_agents_and_guards_killed_together() { killed_again_and_again KILL '^/usr/local/bin/slackwater(-guard| guard| serve .*--role=(node|all))'; }
test_routers_killed() {
    routers
    killed_again_and_again KILL "$ROUTER"
}
test_sidecars_killed() { killed_again_and_again KILL "$SIDECARS"; }
test_kubelets_killed() { killed_again_and_again KILL '^(/usr/bin/)?kubelet --'; }

test_no_api_server_for_a_minute() {
    writer
    ask 1
    sleep 1
    trap 'kill_on 1 CONT "^kube-apiserver "' EXIT
    kill_on 1 STOP '^kube-apiserver '
    is "API servers that stand still" "$KILLED" 1
    # (kubectl cannot be used until then)
    sleep 60
    kill_on 1 CONT '^kube-apiserver '
    trap - EXIT
    eventually 120 kubectl get --raw /readyz
    note "the API server answers again"
    answered 1
    # (an external-snapshotter that starts without an API server runs without groups)
    group after load
    note "a group snapshot succeeds as well"
    withdraw 1
    writes_on
    nothing_frozen
    gone volumegroupsnapshot --all
}

# The pod of a node's driver is deleted by force while groups are cut: nothing stays frozen, and no
# incomplete group is kept.
test_node_pods_deleted_by_force_while_groups_are_cut() {
    local i
    writer
    for i in 1 2 3 4; do
        group_of "g$i" load
        sleep "$(awk -v i="$i" 'BEGIN {print 0.4 * (i - 1)}')"
        kubectl -n $SYSTEM delete pod -l app.kubernetes.io/component=node --force --grace-period=0 --wait=false >/dev/null 2>&1
        ready_group "g$i"
        is "members of group $i" "$(members "g$i" | wc -l)" 1
    done
    writes_on
    nothing_frozen
    gone volumegroupsnapshot --all
}

# The network of one node's agent: packets to its port are dropped, as if the network were cut. Other traffic
# is not affected.
wire() { # NODE nft's words
    local n=$1
    shift
    # shellcheck disable=SC2016
    node_exec "$n" sh -c 'nsenter --net --target "$(pgrep -o -f "$1")" nft "$2"' sh "$AGENT" "$*"
}
cut_wire() {
    wire "$1" 'add table inet e2e; add chain inet e2e in { type filter hook input priority 0; }; add rule inet e2e in tcp dport 9820 drop; add chain inet e2e out { type filter hook output priority 0; }; add rule inet e2e out tcp sport 9820 drop'
}
mend_wire() { wire "$1" 'delete table inet e2e'; }

test_the_network_between_routers_and_an_agent_is_cut() {
    two_nodes
    routers
    local pool said i
    writer "$NODE_2"
    LABELS='set: load' claim near 100Mi
    pod near -n "$NODE_1" near:/v
    ready pod/near
    group whole load
    is "members of a group across the nodes" "$(members whole | wc -l)" 2
    pool=$(pool_id 2)
    cut_wire 2
    trap 'mend_wire 2 || :' EXIT
    said=$(inside load 'cat /tmp/said')
    ask 1
    group_of during load
    snapshot other near
    claim new 100Mi
    pod new -n "$NODE_1" new:/v
    ready pod/new
    note "the other node serves volumes and snapshots during that time"
    until_health "$pool" Unreachable 2
    told() { get volumesnapshot/r1-1 .status.error.message | grep -q "$NODE_2"; }
    eventually 120 told
    note "the error of a snapshot: $(get volumesnapshot/r1-1 .status.error.message)"
    is "the snapshot of a volume there" "$(get volumesnapshot/r1-1 .status.readyToUse)" false
    is "the group" "$(get volumegroupsnapshot/during .status.readyToUse)" false
    is "members of the group" "$(members during | wc -l)" 0
    nothing_frozen
    mend_wire 2
    answered 1
    ready_group during
    is "members of the group, once the wire is mended" "$(members during | wc -l)" 2
    until_health "$pool" Healthy 2
    restored_has r1-2 "$said"
    withdraw 1
    # The network is cut while groups are being cut.
    for i in 1 2 3; do
        group_of "mid-$i" load
        sleep "$(awk -v i="$i" 'BEGIN {print 0.5 * i}')"
        cut_wire 2
        sleep 8
        nothing_frozen
        mend_wire 2
        ready_group "mid-$i"
        is "members of mid-$i, and their moments" "$(members "mid-$i" | wc -l) $(members "mid-$i" | awk '{print $3}' | sort -u | wc -l)" "2 1"
    done
    trap - EXIT
    writes_on
    gone volumegroupsnapshot --all
}

# The leading pod of each sidecar and of the routers is deleted by force in the middle of its calls. Another
# one continues with the same names, at another router.
test_leaders_change_in_the_middle_of_calls() {
    two_nodes
    routers
    local round=0 lease pod
    writer "$NODE_2"
    LABELS='set: load' claim near 100Mi
    pod near -n "$NODE_1" near:/v
    ready pod/near
    for lease in '^csi-' '^external-snapshotter-' '^external-attacher-' '^slackwater'; do
        round=$((round + 1))
        pod=$(leader "$lease")
        group_of "g$round" load
        ask $round
        [ "$lease" != ^external-attacher- ] || sleep 1
        kubectl -n $SYSTEM delete pod "$pod" --force --grace-period=0 --wait=false >/dev/null 2>&1
        answered $round
        ready_group "g$round"
        is "members of the group, and their moments" "$(members "g$round" | wc -l) $(members "g$round" | awk '{print $3}' | sort -u | wc -l)" "2 1"
        withdraw $round
        kubectl -n $SYSTEM rollout status --timeout="$WAIT" deployment >/dev/null
        another_leads() { [ -n "$(leader "$lease")" ] && [ "$(leader "$lease")" != "$pod" ]; }
        eventually 120 another_leads
        note "$pod led $lease, and $(leader "$lease") does now"
    done
    writes_on
    nothing_frozen
    gone volumegroupsnapshot --all
}
