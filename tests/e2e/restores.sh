# Schedules, reverts, restores and transfers, with `kubectl slackwater` as a person would use it. Needs
# target/release/kubectl-slackwater (make e2e builds it).
# E2E_KILLS=20: the number of kills of each process in each workflow (make soak).
# shellcheck shell=bash
# shellcheck source=tests/e2e/databases.sh
. "$E2E/databases.sh" # for its functions, and PostgreSQL

# kubectl finds the plugin by its name.
slackwater() { PATH=$TARGET/release:$PATH kubectl slackwater "$@" --namespace "$NS"; }

# with_schedules: the controller executes schedules, and may keep what a revert replaces.
with_schedules() {
    [ -x "$TARGET/release/kubectl-slackwater" ] || { note "no $TARGET/release/kubectl-slackwater (cargo build --release --package kubectl-slackwater)"; exit 77; }
    two_nodes
    chart --set schedules.create=true --set reverts.keepOld=true
    trap clean_up EXIT
}
CLIENT='' OTHER=''
# clean_up: also if a test fails.
clean_up() {
    [ -z "$CLIENT" ] || kill "$CLIENT" 2>/dev/null || :
    [ -z "$OTHER" ] || kubectl delete namespace "$OTHER" --ignore-not-found --wait=false >/dev/null
    kubectl delete clusterrole,clusterrolebinding "check-$NS" --ignore-not-found >/dev/null
    chart --set schedules.create=false --set reverts.keepOld=false
}
chart() {
    helm upgrade slackwater "$E2E/../../deploy/chart" --namespace "$SYSTEM" --reuse-values "$@" >/dev/null
    kubectl -n "$SYSTEM" rollout status --timeout="$WAIT" deployment/slackwater-controller >/dev/null
}

# PostgreSQL with a table whose rows are numbered without a gap, and a client that commits one row after the
# other and records what was acknowledged.
orders() {
    example postgresql orders
    sql orders-0 'CREATE TABLE log (id bigint PRIMARY KEY, at timestamptz DEFAULT clock_timestamp())'
    client
}
sql() { k exec "$1" -c postgresql -- psql -U postgres -XqAt -v ON_ERROR_STOP=1 -c "$2"; }
RUNS=()
client() {
    commits orders-0 'BEGIN; INSERT INTO log SELECT coalesce(max(id), 0) + 1 FROM log; COMMIT; SELECT max(id) FROM log;' \
        'psql -U postgres -XqAt -v ON_ERROR_STOP=1'
    CLIENT=$!
    trap clean_up EXIT # `commits` has set another one
}
# has_commits POD NUMBER: each row up to at least that number is there.
has_commits() {
    is "rows without a gap, and at least $2" "$(sql "$1" "SELECT count(*) = max(id), count(*) >= $2 FROM log")" 't|t'
    note "it has $(sql "$1" 'SELECT max(id) FROM log') rows; $2 were acknowledged before the snapshot was requested"
}

# schedule NAME CRON [CLASS [KEEP]]
schedule() {
    apply <<EOF
apiVersion: slackwater.dev/v1alpha1
kind: SnapshotSchedule
metadata: {name: $1}
spec:
  selector: {matchLabels: {app: orders}}
  class: ${3:-slackwater-application}
  cron: "$2"
  keep: ${4:-{last: 5\}}
EOF
    # A controller executes it. Another one leads a moment after it was replaced.
    k wait --for=condition=Scheduling --timeout="$WAIT" "snapshotschedules.slackwater.dev/$1" >/dev/null
}
# run_schedule NAME: executes it now. The set is in SET, and the last number that was acknowledged before in BEFORE.
run_schedule() {
    BEFORE=$(acknowledged)
    slackwater schedule run "$1" --yes --wait --timeout 5m >"$LOGS/$NS.run" || fail "schedule run: $(cat "$LOGS/$NS.run")" || return 1
    SET=$(sets | grep -e "-$(date --utc --date="$(get "snapshotschedules.slackwater.dev/$1" .spec.runAt)" +%Y%m%d-%H%M)-")
    RUNS+=("$SET")
    ready_group "$SET"
}
sets() { k get volumegroupsnapshots -l slackwater.dev/schedule-uid -o name | cut -d / -f 2 | sort; }
scale() { # REPLICAS
    k scale statefulset/orders --replicas="$1" >/dev/null
    if [ "$1" = 0 ]; then k wait --for=delete pod/orders-0 --timeout="$WAIT" >/dev/null; else
        k rollout status --timeout="$WAIT" statefulset/orders >/dev/null || fail "PostgreSQL does not start: $(k logs orders-0 --tail=20)"
    fi
}
annotation() { # GROUP NAME
    kubectl get volumegroupsnapshotcontent "$(get "volumegroupsnapshot/$1" .status.boundVolumeGroupSnapshotContentName)" \
        -o "jsonpath={.metadata.annotations.slackwater\.dev/$2}"
}

# Kills of each process while a workflow runs in the background: kills_during PID PATTERN...
kills_during() {
    local pid=$1 n pattern round
    shift
    for round in $(seq "${E2E_KILLS:-1}"); do
        for pattern; do
            for n in $(running); do
                sleep "0.$((RANDOM % 10))"
                kill -0 "$pid" 2>/dev/null || { note "it ended before kill $round of $pattern"; return 0; }
                node_exec "$n" pkill -9 -f "$pattern" || :
            done
        done
    done
}

test_postgresql_is_scheduled_cut_destroyed_and_restored() {
    local first kept code
    with_schedules
    orders
    schedule hourly '*/5 * * * *'

    # A run of the schedule, while the controller and the agents are killed.
    kills_during $$ "$ROUTER" "$AGENT" &
    run_schedule hourly
    wait $!
    first=$SET
    is "the level of $first" "$(annotation "$first" level)" application
    note "frozen for $(annotation "$first" frozen-ms) ms, held for $(annotation "$first" held-ms) ms"
    go_on
    kill "$CLIENT"

    # In place: the claims and their volumes stay. Agents and controller are killed.
    sql orders-0 'DROP TABLE log'
    scale 0
    claims=$(k get pvc -o 'jsonpath={range .items[*]}{.metadata.uid}{.spec.volumeName}{"\n"}{end}')
    slackwater revert --group "$first" --keep-old --yes --wait --timeout 5m >"$LOGS/$NS.revert" 2>&1 &
    kills_during $! "$AGENT" "$ROUTER"
    code=0
    wait $! || code=$?
    [ "$code" = 0 ] || fail "revert: $code $(cat "$LOGS/$NS.revert")" || return 1
    is "the same claims" "$(k get pvc -o 'jsonpath={range .items[*]}{.metadata.uid}{.spec.volumeName}{"\n"}{end}')" "$claims"
    scale 1
    has_commits orders-0 "$BEFORE"
    kept=$(k get volumesnapshots -o name | grep -c before-revert-)
    is "snapshots of what was there before" "$kept" 2
    nothing_frozen

    # Under the same names: the StatefulSet, its claims and their volumes are gone. The plugin is killed.
    client
    run_schedule hourly
    go_on
    kill "$CLIENT"
    gone statefulset/orders
    gone pod --all --grace-period=1
    gone pvc --all
    sed 's/replicas: 1/replicas: 0/' "$EXAMPLES/postgresql.yaml" | k apply -f - >/dev/null
    for _ in $(seq "${E2E_KILLS:-1}"); do
        timeout --signal=KILL "0.$((RANDOM % 10))" "$TARGET/release/kubectl-slackwater" restore "$SET" \
            --statefulset orders --yes --namespace "$NS" >/dev/null 2>&1 || :
    done
    slackwater restore "$SET" --statefulset orders --yes --wait --timeout 5m
    scale 1
    has_commits orders-0 "$BEFORE"

    # The schedule's own slot comes, too, with what runs then.
    of_its_own() { sets | grep --invert-match --quiet --line-regexp "${RUNS[@]/#/--regexp=}"; }
    eventually 360 of_its_own || fail "no set but those of runs: $(sets)" || return 1
    has "the schedule" "$(slackwater schedules)" application
    delete_all
}

# The leading pods are deleted by force in the middle of what they execute: those of the controller and of
# csi-snapshotter while a schedule is run, and that of the controller again and again while a slot of the schedule
# comes. Each slot has one whole set, and what is not to be kept is deleted.
test_a_schedule_is_executed_while_leaders_change() {
    local lease pod slot mark expected=()
    with_schedules
    for name in a b; do LABELS='app: orders' claim "$name" 100Mi; done
    pod writer a:/a b:/b
    ready pod/writer
    # No slot of its own comes while it is run.
    [ $(($(date +%s) % 300)) -lt 60 ] || sleep $((300 - $(date +%s) % 300))
    schedule often '*/5 * * * *' slackwater '{maxAge: 300d}'
    for lease in ^slackwater ^external-snapshotter- ^slackwater; do
        pod=$(leader "$lease")
        slackwater schedule run often --yes >"$LOGS/$NS.run" || fail "schedule run: $(cat "$LOGS/$NS.run")" || return 1
        sleep "0.$((RANDOM % 10))"
        without "$pod"
        slot=$(set_at "$(get snapshotschedules.slackwater.dev/often .spec.runAt)")
        expected+=("$slot")
        whole_set "$slot"
        note "$slot is ready, although $pod, which led $lease, is gone"
        kubectl -n "$SYSTEM" rollout status --timeout="$WAIT" deployment >/dev/null
        # A minute is one slot.
        sleep $((61 - $(date +%s) % 60))
    done

    # One slot of its own.
    mark=$(($(date +%s) / 300 * 300 + 300))
    sleep $((mark - $(date +%s)))
    while [ "$(date +%s)" -lt $((mark + 75)) ]; do
        without "$(leader ^slackwater)" || :
        sleep $((5 + RANDOM % 10))
    done
    slot=$(set_at "@$mark")
    expected+=("$slot")
    whole_set "$slot"
    note "$slot is ready"
    [ "$(date +%s)" -lt $((mark + 240)) ] || fail "too late to count the sets" || return 1
    is "the sets" "$(sets | xargs)" "$(printf "%s\n" "${expected[@]}" | sort | xargs)"
    is "skipped slots" "$(get snapshotschedules.slackwater.dev/often '.status.skippedSlots[*]')" ''

    # What is not to be kept.
    k patch snapshotschedules.slackwater.dev/often --type merge -p '{"spec": {"keep": {"last": 1, "maxAge": null}}}' >/dev/null
    sleep "$((RANDOM % 5)).$((RANDOM % 10))"
    without "$(leader ^slackwater)"
    only_the_newest() { [ "$(sets | wc -l)" = 1 ] || fail "sets: $(sets)"; }
    eventually 240 only_the_newest
    whole_set "$(sets)"
    delete_all
}
# The name of the set of schedule `often` at a time.
set_at() {
    echo "often-$(date --utc --date="$1" +%Y%m%d-%H%M)-$(get snapshotschedules.slackwater.dev/often .metadata.uid | cut -c 1-5)"
}
# Deletes a pod of the controller at once, as if its node were gone.
without() { # POD
    kubectl -n "$SYSTEM" delete pod "$1" --force --grace-period=0 --wait=false >/dev/null 2>&1
}
whole_set() { # NAME
    eventually 180 get "volumegroupsnapshot/$1" .metadata.name
    ready_group "$1"
    is "members of $1, and their moments" "$(members "$1" | wc -l) $(members "$1" | awk '{print $3}' | sort -u | wc -l)" "2 1"
}

# docs/restore.md, "PostgreSQL: point-in-time recovery", step by step.
test_postgresql_is_recovered_to_a_point_in_time() {
    local at last segment
    with_schedules
    claim archive 1Gi
    orders
    # The archive of the log is on a claim of its own, which the schedule does not cut.
    k patch statefulset/orders --type strategic -p '{"spec": {"template": {"spec": {
        "containers": [{"name": "postgresql", "volumeMounts": [{"name": "archive", "mountPath": "/archive"}]}],
        "volumes": [{"name": "archive", "persistentVolumeClaim": {"claimName": "archive"}}]}}}}' >/dev/null
    kill "$CLIENT"
    k rollout status --timeout="$WAIT" statefulset/orders >/dev/null
    sql orders-0 "ALTER SYSTEM SET archive_mode = on"
    sql orders-0 "ALTER SYSTEM SET archive_command = 'test ! -f /archive/%f && cp %p /archive/%f'"
    scale 0
    scale 1
    client
    schedule hourly '7 3 * * *'
    run_schedule hourly
    go_on
    # The moment before an error; what was acknowledged until then must be there, and nothing later.
    last=$(acknowledged)
    at=$(sql orders-0 'SELECT clock_timestamp()')
    go_on
    kill "$CLIENT"
    sql orders-0 "DELETE FROM log WHERE id < $last"
    segment=$(sql orders-0 'SELECT pg_walfile_name(pg_switch_wal())')
    archived() { [ "$(sql orders-0 "SELECT last_archived_wal >= '$segment' FROM pg_stat_archiver")" = t ]; }
    eventually 60 archived
    scale 0
    slackwater restore "$SET" --statefulset orders --suffix pitr --yes
    # What the StatefulSet expects under its new name. It reads the archive, and must not write to it.
    pod prepare data-orders-pitr-0:/data
    ready pod/prepare
    inside prepare 'touch /data/pgdata/recovery.signal && chown 999:999 /data/pgdata/recovery.signal'
    inside prepare "printf '%s\n' \"archive_mode = off\" \"restore_command = 'cp /archive/%f %p'\" \"recovery_target_time = '$at'\" \"recovery_target_action = promote\" >>/data/pgdata/postgresql.auto.conf"
    gone pod/prepare
    sed 's/orders/orders-pitr/; s/replicas: 1/replicas: 0/' "$EXAMPLES/postgresql.yaml" | k apply -f - >/dev/null
    k patch statefulset/orders-pitr --type strategic -p '{"spec": {"template": {"spec": {
        "containers": [{"name": "postgresql", "volumeMounts": [{"name": "archive", "mountPath": "/archive", "readOnly": true}]}],
        "volumes": [{"name": "archive", "persistentVolumeClaim": {"claimName": "archive"}}]}}}}' >/dev/null
    k scale statefulset/orders-pitr --replicas=1 >/dev/null
    k rollout status --timeout="$WAIT" statefulset/orders-pitr >/dev/null || fail "PostgreSQL does not recover: $(k logs orders-pitr-0 --tail=30)" || return 1
    recovered() { [ "$(sql orders-pitr-0 'SELECT pg_is_in_recovery()')" = f ]; }
    eventually 60 recovered
    has_commits orders-pitr-0 "$last"
    is "rows that were committed later" "$(sql orders-pitr-0 "SELECT count(*) FROM log WHERE at > '$at'")" 0
    [ "$BEFORE" -lt "$last" ] || fail "the target is not later than the cut" || return 1
    delete_all
}

# A copy is proven by a check in a pod, and others are given to another namespace, with interruptions.
test_a_group_is_checked_and_transferred() {
    with_schedules
    orders
    schedule hourly '7 3 * * *'
    run_schedule hourly
    kill "$CLIENT"
    rights_of_the_check | apply
    # The controller writes it a moment after the set is ready.
    k wait --for='jsonpath={.status.lastCutSlot}' --timeout="$WAIT" snapshotschedules.slackwater.dev/hourly >/dev/null
    slackwater restore snapshotschedule/hourly --suffix check --yes --discard --as "system:serviceaccount:$NS:check-$NS" \
        --verify-image docker.io/library/postgres:15 --verify-user 999 \
        --verify 'pg_controldata /restored/data-orders-0/pgdata && ls /restored/wal-orders-0/pg_wal' >"$LOGS/$NS.verify" 2>&1 ||
        fail "the check: $(cat "$LOGS/$NS.verify")" || return 1
    has "the check" "$(tail -n 1 "$LOGS/$NS.verify")" 'The check succeeded'
    no_claims_of() { ! k get pvc -o name | grep --quiet -e "$1"; }
    eventually 60 no_claims_of check
    slackwater restore "$SET" --suffix copy --yes
    pod reader data-orders-0-copy:/data wal-orders-0-copy:/wal
    ready pod/reader
    gone pod/reader
    OTHER=$NS-other
    kubectl create namespace "$OTHER" >/dev/null
    for name in data wal; do
        for _ in $(seq "${E2E_KILLS:-1}"); do
            timeout --signal=KILL "0.$((RANDOM % 10))" "$TARGET/release/kubectl-slackwater" transfer "$name-orders-0-copy" \
                --to-namespace "$OTHER" --name "$name-orders-0" --yes --namespace "$NS" >/dev/null 2>&1 || :
        done
        slackwater transfer "$name-orders-0-copy" --to-namespace "$OTHER" --name "$name-orders-0" --yes
    done
    starts_in "$OTHER"
    kubectl delete namespace "$OTHER" --wait --timeout="$WAIT" >/dev/null

    # The same with one command.
    kubectl create namespace "$OTHER" >/dev/null
    for _ in $(seq "${E2E_KILLS:-1}"); do
        timeout --signal=KILL "$((RANDOM % 5)).$((RANDOM % 10))" "$TARGET/release/kubectl-slackwater" restore "$SET" \
            --to-namespace "$OTHER" --yes --wait --timeout 5m --namespace "$NS" >/dev/null 2>&1 || :
    done
    slackwater restore "$SET" --to-namespace "$OTHER" --yes --wait --timeout 5m
    eventually 60 no_claims_of restore-
    starts_in "$OTHER"
    kubectl delete namespace "$OTHER" --wait --timeout="$WAIT" >/dev/null
    delete_all
}

# rights_of_the_check: the manifests of docs/restore.md for the CronJob that checks a schedule, without the job.
rights_of_the_check() {
    sed --quiet '/^    apiVersion: v1$/,/^    apiVersion: batch/s/^    //p' "$E2E/../../docs/restore.md" |
        sed "/^apiVersion: batch/d; s/check-pg/check-$NS/g; s/namespace: shop/namespace: $NS/"
}

# The CronJob of docs/restore.md restores and checks what a schedule takes, and the schedule reports its results.
test_a_schedule_reports_the_checks_of_its_cronjob() {
    local root schedule=snapshotschedules.slackwater.dev/hourly ACKNOWLEDGED=/dev/null # no client
    with_schedules
    LABELS='app: orders' claim data 100Mi
    pod writer -c "echo precious > /v/file; sync; sleep 100000" data:/v
    ready pod/writer
    eventually 60 inside writer 'grep -q precious /v/file'
    schedule hourly '7 3 * * *' slackwater
    run_schedule hourly
    k wait --for='jsonpath={.status.lastCutSlot}' --timeout="$WAIT" "$schedule" >/dev/null
    restore_checked() { get "$schedule" ".status.conditions[?(@.type==\"RestoreChecked\")].$1"; }
    becomes() { # REASON: of the condition. The controller reads the CronJob once a minute.
        is_now() { [ "$(restore_checked reason)" = "$1" ]; }
        eventually 240 is_now "$1" || fail "the condition is $(restore_checked reason): $(restore_checked message); $(k get jobs,pods,pvc)" || return 1
        note "RestoreChecked: $(restore_checked status), $1: $(restore_checked message)"
    }
    k patch "$schedule" --type merge -p '{"spec": {"check": {"cronJob": "check"}}}' >/dev/null
    becomes NoCronJob

    # An image with the program of the release.
    root=$(mktemp -d)
    "$E2E/../image" copy "$root" "$TARGET/release/kubectl-slackwater"
    "$E2E/../image" pack "$LOGS/kubectl-slackwater.tar" registry.example/kubectl-slackwater:test "$root"
    rm -rf "$root"
    load_image "$LOGS/kubectl-slackwater.tar"
    rm "$LOGS/kubectl-slackwater.tar"
    rights_of_the_check | apply
    check_with 'grep precious /restored/data/file'
    becomes Checked
    has "kubectl slackwater schedules" "$(slackwater schedules -o wide)" hourly
    no_copies() { [ "$(k get pvc -o name | xargs)" = persistentvolumeclaim/data ]; }
    eventually 60 no_copies || fail "claims: $(k get pvc)" || return 1

    check_with 'grep absent /restored/data/file'
    becomes CheckFailed
    has "the event" "$(k get events --field-selector reason=RestoreCheckFailed -o 'jsonpath={.items[*].message}')" 'has not succeeded'
    has "kubectl slackwater schedules" "$(slackwater schedules)" 'has not succeeded'
    check_with 'grep precious /restored/data/file'
    becomes Checked
    gone cronjob/check
    delete_all
    eventually 60 no_copies || fail "claims: $(k get pvc)" || return 1
}
# check_with COMMAND: the CronJob of docs/restore.md, but each minute, with this check and another image.
check_with() {
    sed --quiet '/^    apiVersion: batch/,/^The image/s/^    //p' "$E2E/../../docs/restore.md" | sed \
        -e "s/name: check-pg/name: check/; s/serviceAccountName: check-pg/serviceAccountName: check-$NS/; s/namespace: shop/namespace: $NS/" \
        -e "s/--namespace=shop/--namespace=$NS/; s|schedule/pg|schedule/hourly|; s/30 3 /* * /" \
        -e "s|registry.example/kubectl-slackwater|&:test|; s|--verify=.*|--verify=$1|" \
        -e "s|postgres:17|docker.io/library/busybox:1.35.0|; /--verify-user/d" | apply
}

# A namespace is deleted with its group of snapshots, whose contents are Retain, and the group is restored into
# another one, with interruptions. The PersistentVolume of one claim is Retain, so its name is known.
test_a_group_is_restored_whose_namespace_is_gone() {
    local own=$NS other=$NS-other source=$NS-source content members second volume words
    [ -x "$TARGET/release/kubectl-slackwater" ] || { note "no $TARGET/release/kubectl-slackwater (cargo build --release --package kubectl-slackwater)"; exit 77; }
    kubectl create namespace "$source" >/dev/null
    kubectl create namespace "$other" >/dev/null
    # shellcheck disable=SC2064 # now
    trap "kubectl delete namespace $source $other --ignore-not-found --wait=false >/dev/null" EXIT
    NS=$source
    for name in a b; do LABELS='set: left' claim "$name" 100Mi; done
    pod writer -c "echo of-a > /a/file; echo of-b > /b/file; sync; sleep 100000" a:/a b:/b
    ready pod/writer
    has_files() { [ "$(inside "$1" 'cat /a/file /b/file | tr "\n" " "')" = "of-a of-b " ]; }
    eventually 60 has_files writer
    group left left
    content=$(get volumegroupsnapshot/left .status.boundVolumeGroupSnapshotContentName)
    members=$(for one in $(members left | cut -d ' ' -f 1); do get "volumesnapshot/$one" .status.boundVolumeSnapshotContentName; echo; done)
    second=$(get "volumesnapshot/$(members left | awk '$2 == "b" {print $1}')" .status.boundVolumeSnapshotContentName)
    retain() { kubectl patch "$1" --type merge -p "{\"spec\":{\"$2\":\"$3\"}}" >/dev/null; }
    retain "volumegroupsnapshotcontent/$content" deletionPolicy Retain
    for one in $members; do retain "volumesnapshotcontent/$one" deletionPolicy Retain; done
    volume=$(get pvc/a .spec.volumeName)
    retain "pv/$volume" persistentVolumeReclaimPolicy Retain

    words=("$TARGET/release/kubectl-slackwater" restore "volumegroupsnapshotcontent/$content" --to-namespace "$other" \
        --claim "$second=b" --storage-class slackwater --yes)
    restore() { "${words[@]}" "$@"; }
    ! restore >"$LOGS/$own.exists" 2>&1 || fail "the namespace exists" || return 1
    has "the refusal" "$(cat "$LOGS/$own.exists")" 'which exists: restore that one'
    gone pod --all --grace-period=1
    kubectl delete namespace "$source" --wait --timeout="$WAIT" >/dev/null
    NS=$other
    for _ in $(seq "${E2E_KILLS:-1}"); do
        timeout --signal=KILL "$((RANDOM % 5)).$((RANDOM % 10))" "${words[@]}" >/dev/null 2>&1 || :
    done
    restore --wait --timeout 5m
    restore --wait --timeout 5m
    is "temporary objects" "$(kubectl get volumesnapshots,volumesnapshotcontents -A -o name | grep -c -e /restore-)" 0
    is "contents of before" "$(kubectl get volumesnapshotcontents -o name | grep -c -F "$members")" 2
    pod reader a:/a b:/b
    ready pod/reader
    has_files reader || fail "the files are of other volumes" || return 1

    # Everything can be deleted.
    gone pod --all --grace-period=1
    kubectl delete namespace "$other" --wait --timeout="$WAIT" >/dev/null
    retain "pv/$volume" persistentVolumeReclaimPolicy Delete
    retain "volumegroupsnapshotcontent/$content" deletionPolicy Delete
    for one in $members; do retain "volumesnapshotcontent/$one" deletionPolicy Delete; done
    gone "volumegroupsnapshotcontent/$content"
    for one in $members; do gone "volumesnapshotcontent/$one"; done
    NS=$own
}

# A volume of which no object is left gets a PersistentVolume and a claim, and is used again.
test_an_orphan_is_adopted() {
    local volume id
    [ -x "$TARGET/release/kubectl-slackwater" ] || { note "no $TARGET/release/kubectl-slackwater"; exit 77; }
    claim data 100Mi
    pod writer -c "echo precious > /v/file; sync; sleep 100000" data:/v
    ready pod/writer
    has_file() { [ "$(inside "$1" 'cat /v/file')" = precious ]; }
    eventually 60 has_file writer
    volume=$(get pvc/data .spec.volumeName)
    id=$(kubectl get "pv/$volume" -o 'jsonpath={.spec.csi.volumeHandle}')
    kubectl patch "pv/$volume" --type merge -p '{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}' >/dev/null
    gone pod/writer
    gone pvc/data
    kubectl delete pv "$volume" --wait --timeout="$WAIT" >/dev/null
    is_listed() { [[ $(slackwater orphans -o wide) == *"$id"*"$NS/data"* ]]; }
    eventually 600 is_listed # the controller looks for orphans every 5 minutes
    note "$(slackwater orphans -o wide | grep "$id")"
    slackwater orphans --adopt "$id" --yes | sed 's/^/       /'
    slackwater orphans --adopt "$id" --yes >/dev/null # a repeat finds it adopted
    pod reader data:/v
    ready pod/reader
    has_file reader || fail "the file is gone" || return 1
    # Everything can be deleted.
    gone pod/reader
    volume=$(get pvc/data .spec.volumeName)
    kubectl patch "pv/$volume" --type merge -p '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}' >/dev/null
    gone pvc/data
    kubectl wait --for=delete "pv/$volume" --timeout="$WAIT" >/dev/null
}

# With --verify, a copy reaches another namespace only if its check succeeds.
test_a_copy_is_checked_before_its_transfer() {
    local other=$NS-there
    [ -x "$TARGET/release/kubectl-slackwater" ] || { note "no $TARGET/release/kubectl-slackwater"; exit 77; }
    kubectl create namespace "$other" >/dev/null
    # shellcheck disable=SC2064 # now
    trap "kubectl delete namespace $other --ignore-not-found --wait=false >/dev/null" EXIT
    claim data 100Mi
    pod writer -c "echo precious > /v/file; sync; sleep 100000" data:/v
    ready pod/writer
    eventually 60 inside writer 'grep -q precious /v/file'
    snapshot before data
    to_other() { slackwater restore volumesnapshot/before --to-namespace "$other" --yes --verify-image docker.io/library/busybox:1.35.0 --verify "$1"; }
    ! to_other 'grep absent /restored/data/file' >"$LOGS/$NS.refused" 2>&1 || fail "the check has failed" || return 1
    has "the refusal" "$(cat "$LOGS/$NS.refused")" 'the check failed: exit code 1'
    is "claims there" "$(kubectl -n "$other" get pvc -o name | wc -l)" 0
    to_other 'cat /restored/data/file && ! touch /restored/data/new' 2>&1 | sed 's/^/       /'
    is "the claim there" "$(kubectl -n "$other" get pvc/data -o 'jsonpath={.status.phase}')" Bound
    is "pods of checks" "$(k get pods -l app.kubernetes.io/name=slackwater-verify -o name | wc -l)" 0
    gone pod --all
    (NS=$other; pod reader data:/v; ready pod/reader; has "the file" "$(inside reader 'cat /v/file')" precious; gone pod/reader)
    kubectl delete namespace "$other" --wait --timeout="$WAIT" >/dev/null
    gone volumesnapshot --all
}

# The claims of PostgreSQL in another namespace are used by a StatefulSet there.
starts_in() { # NAMESPACE
    kubectl -n "$1" create configmap slackwater-hooks --from-file="$EXAMPLES/hooks" >/dev/null
    kubectl -n "$1" apply -f "$EXAMPLES/postgresql.yaml" >/dev/null
    kubectl -n "$1" rollout status --timeout="$WAIT" statefulset/orders >/dev/null
    (NS=$1; has_commits orders-0 "$BEFORE")
}

# Everything can be deleted.
delete_all() {
    k delete statefulset --all --cascade=orphan >/dev/null
    gone snapshotschedules.slackwater.dev --all
    gone volumereverts.slackwater.dev --all
    gone pod --all --grace-period=1
    gone volumegroupsnapshot --all
    eventually 60 no_group_members
    gone volumesnapshot --all
}
