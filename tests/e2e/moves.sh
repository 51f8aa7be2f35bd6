# Data moves between nodes: restores on the node of their pod, VolumeMoves, and drains.
# shellcheck shell=bash

# shellcheck source=tests/e2e/databases.sh
. "$E2E/databases.sh" # for its functions

move() { # NAME CLAIM NODE: the volume of a claim moves there, and its source is deleted a second later
    apply <<END
apiVersion: slackwater.dev/v1alpha1
kind: VolumeMove
metadata: {name: $1}
spec: {claim: $2, to: {node: $3}, keepSource: 1s}
END
}
told_of_move() { # NAME: notes its result
    note "$1: $(get "volumemove/$1" .status.bytesTotal) bytes, copied in advance $(get "volumemove/$1" .status.preCopy.round) times, and the volume could not be used for $(get "volumemove/$1" .status.stillMs) ms"
}
# Moves keep no source for the check that nothing is left.
moves_done() { # NAME...
    local name
    for name; do
        until_field "volumemove/$name" .status.phase Done || fail "$(k describe "volumemove/$name")" || return 1
        told_of_move "$name"
    done
}
# Records the phases of a claim with their times, until the test ends.
watch_phases() { # CLAIM
    PHASES=$LOGS/$NS.phases
    (k get "pvc/$1" --watch -o 'jsonpath={.status.phase}{"\n"}' | while read -r phase; do echo "$(date +%s%3N) $phase"; done) >"$PHASES" &
    # shellcheck disable=SC2064 # this one
    trap "pkill -P $! 2>/dev/null; kill $! 2>/dev/null || :" EXIT
}
lost_ms() { awk '$2 == "Lost" && !since {since = $1} $2 == "Bound" && since {sum += $1 - since; since = 0} END {print sum + 0}' "$PHASES"; }
pv_name() { get "pvc/$1" .spec.volumeName; } # CLAIM
received() { # NODE: bytes of snapshots that its agent has received
    local pod
    pod=$(kubectl -n $SYSTEM get pods -l app.kubernetes.io/component=node --field-selector "spec.nodeName=$1" -o 'jsonpath={.items[0].metadata.name}')
    kubectl get --raw "/api/v1/namespaces/$SYSTEM/pods/$pod:9810/proxy/metrics" | awk '$1 == "slackwater_received_bytes_total" {printf "%d", $2}'
}

test_a_volume_moves_to_another_node_and_back() {
    two_nodes
    local volume uid sum
    claim data 200Mi
    MODE=Block claim raw 64Mi
    pod before -n "$NODE_2" data:/v raw:/dev/raw
    ready pod/before
    inside before 'dd if=/dev/urandom of=/v/file bs=1M count=50 2>/dev/null; printf slack-water | dd of=/dev/raw bs=512 seek=1000 conv=fsync 2>/dev/null; sync'
    sum=$(inside before 'sha256sum < /v/file')
    snapshot old data
    volume=$(pv_name data) uid=$(get pvc/data .metadata.uid)
    watch_phases data
    move data data "$NODE_1"
    move raw raw "$NODE_1"
    until_field volumemove/data .status.phase Waiting
    is "the pod" "$(get pod/before .status.phase)" Running
    gone pod/before
    moves_done data raw
    note "the claim was Lost for $(lost_ms) ms"
    is "the claim's volume" "$(pv_name data) $(get pvc/data .metadata.uid) $(get pvc/data .status.phase)" "$volume $uid Bound"
    pod after data:/v raw:/dev/raw
    ready pod/after
    is "its node" "$(node_of after)" "$NODE_1"
    is "the file" "$(inside after 'sha256sum < /v/file')" "$sum"
    is "the block volume" "$(inside after 'dd if=/dev/raw bs=512 skip=1000 count=1 2>/dev/null | head -c 11')" slack-water
    # Snapshots of the new volume are taken on its node; the old one is restored where it is, and its pod there.
    inside after 'echo new > /v/new; sync'
    snapshot new data
    claim of-old 200Mi slackwater VolumeSnapshot/old
    claim of-new 200Mi slackwater VolumeSnapshot/new
    pod of-old of-old:/v
    pod of-new of-new:/v
    ready pod/of-old pod/of-new
    is "the restore of the old snapshot" "$(inside of-old 'sha256sum < /v/file; ls /v')" "$(inside of-new 'rm /v/new; sha256sum < /v/file; ls /v')"
    is "the node of the restore of the old snapshot" "$(node_of of-old)" "$NODE_2"
    is "volumes on the old node" "$(pool_of 2 volumes | wc -l)" 1

    # The way back.
    gone pod/after pod/of-old pod/of-new
    move back data "$NODE_2"
    moves_done back
    pod again data:/v
    ready pod/again
    is "its node" "$(node_of again)" "$NODE_2"
    is "both files" "$(inside again 'sha256sum < /v/file; cat /v/new')" "$sum"$'\n'new
}

test_a_deleted_move_leaves_the_volume_where_it_is() {
    two_nodes
    claim data 100Mi
    pod before -n "$NODE_2" data:/v
    ready pod/before
    inside before 'echo precious > /v/file; sync'
    move data data "$NODE_1"
    until_field volumemove/data .status.phase Waiting
    gone volumemove/data
    gone pod/before
    pod after data:/v
    ready pod/after
    is "its node" "$(node_of after)" "$NODE_2"
    is "the file" "$(inside after 'cat /v/file')" precious
}

# Both claims of a database move under load while its node is drained: the pod starts on the other node with
# every commit that was acknowledged.
test_postgresql_moves_while_its_node_is_drained() {
    two_nodes
    local from to before after ended
    example postgresql orders
    sql() { k exec "$1" -c postgresql -- psql -U postgres -XqAt -v ON_ERROR_STOP=1 -c "$2"; }
    sql orders-0 'CREATE TABLE log (id bigint PRIMARY KEY, payload text)'
    from=$(node_of orders-0)
    to=$NODE_1
    [ "$from" != "$NODE_1" ] || to=$NODE_2
    commits orders-0 "INSERT INTO log VALUES (\$i, repeat(md5('\$i'), 30)); SELECT \$i;" 'psql -U postgres -XqAt -v ON_ERROR_STOP=1'
    move data data-orders-0 "$to"
    move wal wal-orders-0 "$to"
    until_field volumemove/data .status.phase Waiting
    until_field volumemove/wal .status.phase Waiting
    go_on
    # shellcheck disable=SC2064 # this node
    trap "kubectl uncordon $from >/dev/null" EXIT
    kubectl cordon "$from" >/dev/null
    ended=$(date +%s%3N)
    k delete pod orders-0 --wait=false >/dev/null
    moves_done data wal
    k rollout status --timeout="$WAIT" statefulset/orders >/dev/null
    after=$(date +%s%3N)
    is "its node" "$(node_of orders-0)" "$to"
    before=$(acknowledged)
    is "rows, and their greatest" "$(sql orders-0 'SELECT count(*) = max(id) FROM log')" t
    after="$(sql orders-0 'SELECT count(*) FROM log') $((after - ended))"
    [ "${after% *}" -ge "$before" ] || fail "there are ${after% *} rows, and $before were acknowledged" || return 1
    is "each row has its payload" "$(sql orders-0 "SELECT bool_and(payload = repeat(md5(id::text), 30)) FROM log")" t
    note "$before commits were acknowledged, ${after% *} are there; ${after#* } ms from the deletion of the pod to the readiness of the next one"
    kubectl uncordon "$from" >/dev/null
    trap - EXIT
    k delete statefulset --all >/dev/null
    gone pod --all --grace-period=1
}

test_the_pool_of_a_node_with_ten_volumes_is_evacuated() {
    two_nodes
    local i sums pool
    pool=$(pool_id 2)
    stateful_set 10 '[ -e /v/file ] || dd if=/dev/urandom of=/v/file bs=1M count=8; sync'
    all_sums() { for i in 0 1 2 3 4 5 6 7 8 9; do inside db-$i 'wc -c < /v/file; sha256sum < /v/file' || return; done; }
    sums=$(all_sums)
    is "their nodes" "$(k get pods -o 'jsonpath={.items[*].spec.nodeName}' | tr ' ' '\n' | sort | uniq -c | xargs)" "10 $NODE_2"
    # shellcheck disable=SC2064 # this pool
    trap "kubectl uncordon $NODE_2 >/dev/null; kubectl patch pool $pool --type merge -p '{\"spec\":{\"evacuate\":false}}' >/dev/null" EXIT
    kubectl patch pool "$pool" --type merge -p '{"spec":{"evacuate":true}}' >/dev/null
    all_wait() { [ "$(k get volumemoves -l "slackwater.dev/evacuates=$pool" -o 'jsonpath={.items[*].status.phase}' | tr ' ' '\n' | sort | uniq -c | xargs)" = "10 Waiting" ]; }
    eventually 300 all_wait || fail "$(k get volumemoves)" || return 1
    note "all volumes were copied in advance"
    kubectl drain "$NODE_2" --ignore-daemonsets --delete-emptydir-data --force --timeout="$WAIT" >/dev/null 2>&1
    kubectl wait --for=condition=Evacuated --timeout="$WAIT" "pool/$pool" >/dev/null || fail "$(kubectl get pool "$pool" -o 'jsonpath={.status}')" || return 1
    note "the volumes could not be used for these times in ms: $(k get volumemoves -o 'jsonpath={.items[*].status.stillMs}')"
    k rollout status --timeout="$WAIT" statefulset/db >/dev/null
    is "their nodes" "$(k get pods -o 'jsonpath={.items[*].spec.nodeName}' | tr ' ' '\n' | sort | uniq -c | xargs)" "10 $NODE_1"
    [ "$(all_sums)" = "$sums" ] || fail "the files differ: $sums, $(all_sums)" || return 1
    note "ten files are as they were before"
    is "volumes on the drained node" "$(pool_of 2 volumes | wc -l)" 0
    kubectl patch pool "$pool" --type merge -p '{"spec":{"evacuate":false}}' >/dev/null
    kubectl uncordon "$NODE_2" >/dev/null
    trap - EXIT
    spread_routers
}

# The members of a group are on both nodes, and one pod gets all of them: one member is copied to its node.
test_a_group_of_two_nodes_is_restored_into_one_pod() {
    two_nodes
    local where sum_a sum_b before bytes
    LABELS='set: two' claim a 100Mi
    LABELS='set: two' claim b 100Mi
    pod a -n "$NODE_1" a:/v
    pod b -n "$NODE_2" b:/v
    ready pod/a pod/b
    sum_a=$(inside a 'dd if=/dev/urandom of=/v/file bs=1M count=20 2>/dev/null; sync; sha256sum < /v/file')
    sum_b=$(inside b 'dd if=/dev/urandom of=/v/file bs=1M count=20 2>/dev/null; sync; sha256sum < /v/file')
    group spread two
    before=$(($(received "$NODE_1") + $(received "$NODE_2")))
    restore_members spread 100Mi a b
    pod reader restored-a:/a restored-b:/b
    ready pod/reader
    where=$(node_of reader)
    is "the files" "$(inside reader 'sha256sum < /a/file; sha256sum < /b/file')" "$sum_a"$'\n'"$sum_b"
    bytes=$(($(received "$NODE_1") + $(received "$NODE_2") - before))
    [ "$bytes" -ge $((20 << 20)) ] || fail "only $bytes bytes were received from the other node" || return 1
    note "the pod is on $where, and $bytes bytes were received from the other node"
    note "events: $(k get events --field-selector reason=NodeChosen -o 'jsonpath={range .items[*]}{.involvedObject.name}: {.message}{"; "}{end}')"
}

test_a_restore_goes_to_the_node_of_its_pod() {
    two_nodes
    local before bytes
    class e2e-pod restore pod
    claim source 100Mi
    pod source -n "$NODE_2" source:/v
    ready pod/source
    inside source 'dd if=/dev/urandom of=/v/file bs=1M count=20 2>/dev/null; sync'
    snapshot snap source
    before=$(received "$NODE_1")
    claim restored 100Mi e2e-pod VolumeSnapshot/snap
    pod reader -n "$NODE_1" restored:/v
    ready pod/reader
    is "the reader's node" "$(node_of reader)" "$NODE_1"
    is "the file" "$(inside reader 'sha256sum < /v/file')" "$(inside source 'sha256sum < /v/file')"
    bytes=$(($(received "$NODE_1") - before))
    [ "$bytes" -ge $((20 << 20)) ] || fail "only $bytes bytes were received" || return 1
    note "$bytes bytes were received"
}

# A copy that takes long is in the status of its pool, with how much is done, until it has ended.
test_a_restore_that_copies_shows_its_progress() {
    two_nodes
    local pool shown
    [ -x "$TARGET/release/kubectl-slackwater" ] || { note "no $TARGET/release/kubectl-slackwater"; exit 77; }
    class e2e-pod restore pod
    claim source 200Mi
    pod source -n "$NODE_2" source:/v
    ready pod/source
    inside source 'dd if=/dev/urandom of=/v/file bs=1M count=120 2>/dev/null; sync'
    snapshot snap source
    trap 'copy_rate 256Mi' EXIT
    copy_rate 2Mi
    claim restored 200Mi e2e-pod VolumeSnapshot/snap
    pod reader -n "$NODE_1" restored:/v
    pool=$(pool_id 1)
    copy() { kubectl get "pool/$pool" -o "jsonpath={.status.copies.running[0].$1}"; }
    is_running() { [ "$(copy claim)" = "$NS/restored" ] && [ "$(copy bytesDone)" -gt 0 ]; }
    eventually 120 is_running || fail "copies: $(kubectl get "pool/$pool" -o 'jsonpath={.status.copies}')" || return 1
    is "its kind and the node of its source" "$(copy kind) $(copy sourceNode)" "Restore $NODE_2"
    note "$(copy bytesDone) of $(copy bytesTotal) bytes are done"
    shown=$(PATH=$TARGET/release:$PATH kubectl slackwater status --all-namespaces)
    has "kubectl slackwater status" "$shown" "$NS/restored"
    note "$(grep --fixed-strings "$NS/restored" <<<"$shown")"
    ready pod/reader
    is "the file" "$(inside reader 'sha256sum < /v/file')" "$(inside source 'sha256sum < /v/file')"
    is_over() { [ -z "$(copy claim)" ]; }
    eventually 120 is_over
}
# copy_rate RATE: how fast all copies together may read or write a pool
copy_rate() {
    helm upgrade slackwater "$E2E/../../deploy/chart" --namespace "$SYSTEM" --reuse-values --set "node.copyRate=$1" >/dev/null
    kubectl -n "$SYSTEM" rollout status --timeout="$WAIT" daemonset/slackwater-node >/dev/null
}

# A clone has the content of one moment, although its source is written on the other node, and its hidden
# snapshot is deleted.
no_snapshots() { [ -z "$(pool_of 2 snapshots)" ]; }
test_a_clone_goes_to_the_node_of_its_pod() {
    two_nodes
    local before bytes sum
    claim source 100Mi
    pod source -n "$NODE_2" -c 'while sleep 0.05; do date +%s%N >> /v/log; done' source:/v
    ready pod/source
    sum=$(inside source 'dd if=/dev/urandom of=/v/file bs=1M count=20 2>/dev/null; sync; sha256sum < /v/file')
    before=$(received "$NODE_1")
    claim clone 150Mi slackwater PersistentVolumeClaim/source
    pod reader -n "$NODE_1" clone:/v
    ready pod/reader
    is "the reader's node" "$(node_of reader)" "$NODE_1"
    is "the file" "$(inside reader 'sha256sum < /v/file')" "$sum"
    # The log of the clone is the beginning of its source's.
    inside reader 'cat /v/log' >"$LOGS/$NS.clone"
    inside source 'cat /v/log' >"$LOGS/$NS.source"
    [ -s "$LOGS/$NS.clone" ] || fail "the log is empty in the clone" || return 1
    is "the log" "$(head -c "$(stat -c %s "$LOGS/$NS.clone")" "$LOGS/$NS.source" | sha256sum)" "$(sha256sum <"$LOGS/$NS.clone")"
    bytes=$(($(received "$NODE_1") - before))
    [ "$bytes" -ge $((20 << 20)) ] || fail "only $bytes bytes were received" || return 1
    eventually 60 no_snapshots || fail "the hidden snapshot is left: $(pool_of 2 snapshots)" || return 1
    note "$bytes bytes were received, $(wc -l <"$LOGS/$NS.clone") lines of the log are in the clone"
    note "events: $(k get events --field-selector reason=NodeChosen -o 'jsonpath={range .items[*]}{.involvedObject.name}: {.message}{"; "}{end}')"
}
