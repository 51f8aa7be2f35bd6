# Databases in pods, with the manifests of deploy/examples. Their hooks hold them while they are cut under
# load. A database that is started on the restored volumes has every commit that was acknowledged before the
# snapshot was requested.
# shellcheck shell=bash

# shellcheck source=tests/e2e/groups.sh
. "$E2E/groups.sh" # for its functions
EXAMPLES=$E2E/../../deploy/examples

# example DATABASE NAME: starts it, as the README there describes
example() {
    kubectl get clusterrole slackwater-hooks >/dev/null 2>&1 || { note "no router in this installation: no hooks in pods"; exit 77; }
    provide_database "$1"
    kubectl apply -f "$EXAMPLES/classes.yaml" >/dev/null
    kubectl label --overwrite -f "$EXAMPLES/classes.yaml" slackwater-e2e=yes >/dev/null
    k create configmap slackwater-hooks --from-file="$EXAMPLES/hooks" >/dev/null
    allow_hooks
    k apply -f "$EXAMPLES/$1.yaml" >/dev/null
    k rollout status --timeout="$WAIT" "statefulset/$2" >/dev/null
}

# commits POD STATEMENTS CLIENT: $i in the statements is 1, 2, 3, ...; each answers with it once it is
# committed. The acknowledged numbers are recorded here, outside of the cluster.
commits() {
    ACKNOWLEDGED=$LOGS/$NS.acknowledged
    kubectl --namespace "$NS" exec "$1" -- sh -c "i=0; while :; do i=\$((i+1)); echo \"$2\"; done | $3" >"$ACKNOWLEDGED" 2>"$LOGS/$NS.client" &
    # shellcheck disable=SC2064 # this one
    trap "kill $! 2>/dev/null || :" EXIT
    go_on
}
# The last complete number.
acknowledged() { tail -n 2 "$ACKNOWLEDGED" | head -n 1 | grep . || echo 0; }
go_on() {
    local n
    n=$(acknowledged)
    beyond() { [ "$(acknowledged)" -gt $((n + 50)) ]; }
    eventually 120 beyond || fail "nothing is committed after $n: $(cat "$LOGS/$NS.client")" || return 1
}

# held DATABASE: a snapshot of it, at level application, in SNAPSHOT (an object), and the last
# number that was acknowledged before the request in BEFORE
held() {
    local level
    BEFORE=$(acknowledged)
    SNAPSHOT=$(k create -f "$EXAMPLES/$1-snapshot.yaml" -o name)
    until_field "$SNAPSHOT" .status.readyToUse true
    told() { k get events --field-selector "reason=Cut,involvedObject.name=${SNAPSHOT#*/}" -o 'jsonpath={range .items[*]}{.message}{"\n"}{end}' | sort -u | grep .; }
    eventually 60 told
    level=$(told)
    is "the event of ${SNAPSHOT#*/}, asked for after $BEFORE commits" "$level" "cut at level application"
    go_on
}

# copy DATABASE NAME NUMBER: NAME-NUMBER runs on copies of NAME's claims
copy() {
    local template source snap
    while read -r template; do
        source=$template-$2-0
        case $SNAPSHOT in
        volumegroupsnapshot*) snap=$(members "${SNAPSHOT#*/}" | awk -v claim="$source" '$2 == claim {print $1}') ;;
        *) snap=${SNAPSHOT#*/} ;;
        esac
        [ -n "$snap" ] || fail "$SNAPSHOT has no member of claim $source" || return 1
        LABELS="app: $2-$3" claim "$template-$2-$3-0" "$(get "pvc/$source" .spec.resources.requests.storage)" \
            "$(get "pvc/$source" .spec.storageClassName)" "VolumeSnapshot/$snap"
    done < <(get "statefulset/$2" '.spec.volumeClaimTemplates[*].metadata.name' | tr ' ' '\n' | grep .)
    sed "s/$2/$2-$3/" "$EXAMPLES/$1.yaml" | k apply -f - >/dev/null
}

# held_and_recovers DATABASE NAME: three cuts under load, each started on its copies. `rows POD` prints
# how many rows there are, and fails if one is missing in between; `sound POD` checks what else must be true.
held_and_recovers() {
    local round had=()
    for round in 1 2 3; do
        held "$1"
        had[round]=$BEFORE
        copy "$1" "$2" $round
    done
    note "it continues: $(acknowledged) commits are acknowledged"
    for round in 1 2 3; do
        k rollout status --timeout="$WAIT" "statefulset/$2-$round" >/dev/null || fail "copy $round does not start: $(k logs "$2-$round-0" --tail=20)" || return 1
        local there
        there=$(rows "$2-$round-0") || return 1
        [ "$there" -ge "${had[round]}" ] || fail "copy $round has $there rows, and ${had[round]} were acknowledged before" || return 1
        note "copy $round has rows 1 to $there without a gap; ${had[round]} were acknowledged before the request"
        sound "$2-$round-0"
    done
    # Everything can be deleted even while a database still writes.
    k delete statefulset --all --cascade=orphan >/dev/null
    gone pod --all --grace-period=1
    gone volumegroupsnapshot --all
    eventually 60 no_group_members
    gone volumesnapshot --all
}
no_group_members() { [ -z "$(k get volumesnapshots -o 'jsonpath={.items[*].status.volumeGroupSnapshotName}')" ]; }

test_postgresql_on_two_claims_is_held_and_recovers() {
    example postgresql orders
    sql() { k exec "$1" -c postgresql -- psql -U postgres -XqAt -v ON_ERROR_STOP=1 -c "$2"; }
    is "the log's folder" "$(k exec orders-0 -c postgresql -- sh -c 'readlink "$PGDATA/pg_wal"')" /var/lib/postgresql/wal/pg_wal
    sql orders-0 'CREATE TABLE log (id bigint PRIMARY KEY, payload text)'
    sql orders-0 'CREATE TABLE total (n bigint)'
    sql orders-0 'INSERT INTO total VALUES (0)'
    commits orders-0 "BEGIN; INSERT INTO log VALUES (\$i, repeat(md5('\$i'), 30)); UPDATE total SET n = n + 1; COMMIT; SELECT \$i;" \
        'psql -U postgres -XqAt -v ON_ERROR_STOP=1'
    rows() {
        is "rows, their greatest, and the total" "$(sql "$1" 'SELECT count(*) = max(id), count(*) = (SELECT n FROM total) FROM log')" 't|t' >&2 || return 1
        sql "$1" 'SELECT count(*) FROM log'
    }
    sound() {
        is "each row has its payload" "$(sql "$1" "SELECT bool_and(payload = repeat(md5(id::text), 30)) FROM log")" t
        # The hook made a checkpoint, so only the checkpoint itself is replayed.
        local log redo
        log=$(k logs "$1" -c postgresql)
        case $log in
        *'redo is not required'*) redo=0 ;;
        *)
            has "its log" "$log" 'redo done at'
            redo=$(($(position "$log" 'redo done at') - $(position "$log" 'redo starts at')))
            ;;
        esac
        [ "$redo" -lt 4096 ] || fail "$redo bytes of log were replayed" || return 1
        note "$redo bytes of log were replayed"
    }
    position() { # LOG WORDS: of a place in PostgreSQL's log, such as 0/1A2B3C
        local at
        at=$(sed -n "s/.*$2 \([0-9A-F]*\/[0-9A-F]*\).*/\1/p" <<<"$1" | head -1)
        echo $(((16#${at%/*} << 32) + 16#${at#*/}))
    }
    held_and_recovers postgresql orders
}

test_mariadb_is_held_and_recovers() {
    example mariadb stock
    sql() { k exec "$1" -c mariadb -- mariadb --user=mysql --batch --skip-column-names -e "$2"; }
    sql stock-0 'CREATE DATABASE db; CREATE TABLE db.log (id bigint PRIMARY KEY, payload text); CREATE TABLE db.total (n bigint); INSERT INTO db.total VALUES (0)'
    commits stock-0 "BEGIN; INSERT INTO db.log VALUES (\$i, repeat(md5(\$i), 30)); UPDATE db.total SET n = n + 1; COMMIT; SELECT \$i;" \
        'mariadb --user=mysql --batch --skip-column-names --unbuffered'
    rows() {
        is "rows, their greatest, and the total" "$(sql "$1" 'SELECT count(*) = max(id), count(*) = (SELECT n FROM db.total) FROM db.log')" $'1\t1' >&2 || return 1
        sql "$1" 'SELECT count(*) FROM db.log'
    }
    sound() {
        is "each row has its payload" "$(sql "$1" 'SELECT min(payload = repeat(md5(id), 30)) FROM db.log')" 1
        is "the check of its tables" "$(sql "$1" 'CHECK TABLE db.log, db.total EXTENDED' | awk '{print $1, $NF}' | paste -sd,)" 'db.log OK,db.total OK'
    }
    held_and_recovers mariadb stock
}

test_redis_without_an_append_only_file_is_held_and_written_out() {
    example redis cart
    commits cart-0 'RPUSH log $i' 'redis-cli'
    rows() { # (a list: its length, and its last number)
        local length
        length=$(k exec "$1" -- redis-cli -e LLEN log) || return 1
        is "the last number" "$(k exec "$1" -- redis-cli -e LINDEX log -1)" "$length" >&2 || return 1
        echo "$length"
    }
    sound() { is "its first number" "$(k exec "$1" -- redis-cli -e LINDEX log 0)" 1; }
    held_and_recovers redis cart
}
