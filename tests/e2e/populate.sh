# Claims that name a data source are filled by a pod of slackwater-populate before their first use. The HTTP
# server is a pod of the same namespace. Needs target/slackwater-populate-image.tar (make image-populate).
# E2E_KILLS=20: the number of kills of each process in each workflow (make soak).
# shellcheck shell=bash
# shellcheck source=tests/e2e/nodes.sh
. "$E2E/nodes.sh"

POPULATE_ARCHIVE=$TARGET/slackwater-populate-image.tar
CONTROLLER='^/usr/local/bin/slackwater populators '

# with_populators [true|false]: installs the controller, with or without root for block volumes. The image has no registry, so its digest is given a name on each node.
with_populators() {
    local n digest name
    [ -s "$POPULATE_ARCHIVE" ] || { note "no $POPULATE_ARCHIVE (make image-populate)"; exit 77; }
    load_image "$POPULATE_ARCHIVE"
    for n in $(running); do
        read -r name digest < <(node_exec "$n" "$CACHE/bin/ctr" -n k8s.io images list 2>/dev/null |
            awk '$1 ~ /\/slackwater-populate:/ {print $1, $3}')
        node_exec "$n" "$CACHE/bin/ctr" -n k8s.io images tag --force "$name" "${name%:*}@$digest" &>/dev/null
    done
    helm upgrade slackwater "$E2E/../../deploy/chart" --namespace $SYSTEM --reuse-values \
        --set populators.create=true --set "populators.image.repository=${name%:*}" \
        --set "populators.image.digest=$digest" --set "populators.rootForBlock=${1:-true}" >/dev/null
    kubectl -n $SYSTEM rollout status --timeout="$WAIT" deployment/slackwater-populators >/dev/null
    trap 'helm upgrade slackwater "$E2E/../../deploy/chart" --namespace $SYSTEM --reuse-values --set populators.create=false >/dev/null' EXIT
}

# The owner of the namespace allows the controller to create pods in it.
allow_populators() {
    k create rolebinding populators --clusterrole slackwater-populators-namespace \
        --serviceaccount "$SYSTEM:slackwater-populators" >/dev/null
}

# server SCRIPT: a pod whose folder /www is served over HTTP; the script fills it first. It is on SERVER_NODE, if
# that is set.
server() {
    pod server ${SERVER_NODE:+-n "$SERVER_NODE"} -c "mkdir /www && cd /www && $1 && touch /www/ready && httpd -f -v -p 8080 -h /www"
    ready pod/server
    eventually 120 inside server 'test -e /www/ready'
    SERVER=http://$(get pod/server .status.podIP):8080
}

# http_source NAME FILE [FIELD...]: with the file's checksum, unless there are other fields.
http_source() {
    local sum fields=${3:-}
    sum=$(inside server "sha256sum /www/$2 | cut -d ' ' -f 1")
    [ -n "$fields" ] || fields="sha256: '$sum'"
    apply <<END
apiVersion: slackwater.dev/v1alpha1
kind: HttpSource
metadata: {name: $1}
spec: {url: "$SERVER/$2", $fields}
END
}

# from_source CLAIM SIZE SOURCE
from_source() {
    apply <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $1}
spec:
  storageClassName: slackwater
  accessModes: [ReadWriteOnce]
  volumeMode: ${MODE:-Filesystem}
  resources: {requests: {storage: $2}}
  dataSourceRef: {apiGroup: slackwater.dev, kind: HttpSource, name: $3}
END
}

# Neither a prime claim nor a pod of a population is left.
is_clean() { [ -z "$(k get pvc,pod -l slackwater.dev/populates -o name)" ]; }
reason_of() { k get httpsource "$1" -o 'jsonpath={.status.claims[0].reason}'; }
has_reason() { [ "$(reason_of "$1")" = "$2" ]; }

test_claims_are_filled_before_their_first_pod() {
    with_populators
    allow_populators
    server 'mkdir tree && echo hello >tree/file && ln -s file tree/link && tar -cf tree.tar -C tree . && gzip -c tree.tar >tree.tar.gz && dd if=/dev/urandom of=disk bs=1M count=24 2>/dev/null'
    http_source tree tree.tar.gz
    http_source disk disk
    from_source files 64Mi tree
    MODE=Block from_source blocks 64Mi disk
    pod user files:/data blocks:/dev/blocks
    ready pod/user
    is "the file of the archive" "$(inside user 'cat /data/link')" hello
    is "the owner that the pod ran as" "$(inside user 'stat -c %u /data/file')" 65532
    is "the device, beside the object" \
        "$(inside user 'dd if=/dev/blocks bs=1M count=24 2>/dev/null | sha256sum')" "$(inside server 'sha256sum </www/disk')"
    is "the rest of the device" "$(inside user 'dd if=/dev/blocks bs=1M skip=24 2>/dev/null | tr -d "\\0" | wc -c')" 0
    eventually 120 is_clean
    is "the source" "$(get httpsource/disk .status.claims[0].phase)" Populated
    # A populated volume is an ordinary one.
    gone pod/user pvc/blocks
    claim again 64Mi slackwater PersistentVolumeClaim/files
    pod other again:/data
    ready pod/other
    is "its clone" "$(inside other 'cat /data/file')" hello
}

# The runtime of node 1 lets a pod that is not root open its block volumes, and that of node 2 does not.
test_a_block_volume_is_filled_without_root_by_one_runtime() {
    local sum
    two_nodes
    with_populators false
    allow_populators
    server 'dd if=/dev/urandom of=disk bs=1M count=24 2>/dev/null'
    sum=$(inside server 'sha256sum </www/disk')
    http_source disk disk
    MODE=Block from_source here 64Mi disk
    pod here -n "$NODE_1" here:/dev/blocks
    ready pod/here
    is "the device" "$(inside here 'dd if=/dev/blocks bs=1M count=24 2>/dev/null | sha256sum')" "$sum"
    MODE=Block from_source there 64Mi disk
    pod there -n "$NODE_2" there:/dev/blocks
    eventually 180 has_message disk there device_ownership_from_security_context
    has "the message" "$(message_of disk there)" "as root without capabilities in a namespace that allows the baseline profile"
    is "the claim" "$(get pvc/there .status.phase)" Pending
    gone pod/there pvc/there
    eventually 120 is_clean
    with_populators
    MODE=Block from_source as-root 64Mi disk
    pod as-root -n "$NODE_2" as-root:/dev/blocks
    ready pod/as-root
    is "the device" "$(inside as-root 'dd if=/dev/blocks bs=1M count=24 2>/dev/null | sha256sum')" "$sum"
    eventually 120 is_clean
}
message_of() { k get httpsource "$1" -o "jsonpath={.status.claims[?(@.name==\"$2\")].message}"; } # SOURCE CLAIM
has_message() { [[ $(message_of "$1" "$2") == *"$3"* ]]; } # SOURCE CLAIM TEXT

test_a_wrong_checksum_or_a_refused_address_binds_nothing() {
    local wrong message
    with_populators
    allow_populators
    server 'echo content >object'
    wrong=$(printf '0%.0s' {1..64})
    http_source wrong object "sha256: '$wrong'"
    SERVER=https://$(kubectl -n default get service kubernetes -o 'jsonpath={.spec.clusterIP}') \
        http_source inside object 'unverified: true'
    from_source one 64Mi wrong
    from_source two 64Mi inside
    pod user-one one:/data
    pod user-two two:/data
    eventually 180 has_reason wrong PopulateFailed
    eventually 180 has_reason inside PopulateFailed
    message=$(get httpsource/wrong .status.claims[0].message)
    has "the message" "$message" "$wrong"
    has "the message" "$message" "$(inside server 'sha256sum /www/object | cut -d " " -f 1')"
    has "the message" "$(get httpsource/inside .status.claims[0].message)" "is not dialled"
    is "the claims" "$(k get pvc one two -o 'jsonpath={.items[*].status.phase}')" "Pending Pending"
    # A corrected source is enough.
    http_source wrong object
    ready pod/user-one
    is "the file" "$(inside user-one 'cat /data/disk.img | head -c 7')" content
    gone pod/user-two pvc/two
    eventually 120 is_clean
}

test_a_namespace_must_allow_it_and_kills_leave_one_whole_volume() {
    local round
    with_populators
    server 'dd if=/dev/urandom of=disk bs=1M count=192 2>/dev/null'
    http_source disk disk
    from_source disk 256Mi disk
    pod user disk:/data
    eventually 120 has_reason disk NotAllowed
    note "$(get httpsource/disk .status.claims[0].message)"
    allow_populators
    # After the tenth failure, no other attempt is made: each round has another claim.
    for round in $(seq "${E2E_KILLS:-1}"); do
        [ "$round" = 1 ] || { gone pod/user pvc/disk; from_source disk 256Mi disk; pod user disk:/data; }
        eventually 180 attempt_runs
        k delete pod -l slackwater.dev/populates --grace-period=0 --force >/dev/null 2>&1
        kill_all "$CONTROLLER"
        eventually 180 attempt_runs
        kill_all '^/usr/local/bin/slackwater-populate'
        ready pod/user
    done
    is "the object" "$(inside user 'sha256sum </data/disk.img')" "$(inside server 'sha256sum </www/disk')"
    eventually 120 is_clean
}
kill_all() { local n; for n in $(running); do node_exec "$n" pkill -9 -f "$1" || :; done; } # PATTERN
attempt_runs() { [ -n "$(k get pod -l slackwater.dev/populates -o 'jsonpath={.items[*].status.containerStatuses[0].state.running.startedAt}')" ]; }

# The volume is on the node, so the claim is filled after the node has returned.
test_a_node_that_loses_power_during_an_attempt_leaves_one_whole_volume() {
    local round
    two_nodes
    with_populators
    allow_populators
    SERVER_NODE=$NODE_1 server 'dd if=/dev/urandom of=disk bs=1M count=192 2>/dev/null'
    http_source disk disk
    for round in $(seq "${E2E_KILLS:-1}"); do
        from_source "disk-$round" 256Mi disk
        pod "user-$round" -n "$NODE_2" "disk-$round:/data"
        eventually 180 attempt_runs
        node_stop 2
        on_node 2
        ready "pod/user-$round"
        is "the object" "$(inside "user-$round" 'sha256sum </data/disk.img')" "$(inside server 'sha256sum </www/disk')"
        gone "pod/user-$round" "pvc/disk-$round"
    done
    eventually 120 is_clean
}

# The controller and the program are killed while the content is received, snapshotted and restored.
test_kills_while_content_is_cached_leave_whole_volumes() {
    local round n sum
    with_populators
    allow_populators
    server 'dd if=/dev/urandom of=disk bs=1M count=192 2>/dev/null'
    sum=$(inside server 'sha256sum </www/disk')
    for round in $(seq "${E2E_KILLS:-1}"); do
        http_source disk disk "sha256: '${sum%% *}', cache: node"
        for n in {1..4}; do from_source "disk-$n" 256Mi disk; pod "user-$n" -n "$NODE_1" "disk-$n:/data"; done
        eventually 180 attempt_runs
        kill_all '^/usr/local/bin/slackwater-populate'
        # The states that follow take a second or less each.
        for n in {1..4}; do sleep "$((RANDOM % 4)).$((RANDOM % 10))"; kill_all "$CONTROLLER"; done
        for n in {1..4}; do
            ready "pod/user-$n"
            is "the object of claim $n" "$(inside "user-$n" 'sha256sum </data/disk.img')" "$sum"
        done
        eventually 120 is_clean
        gone pod/user-{1..4} pvc/disk-{1..4} httpsource/disk
        eventually 120 has_no_cache
    done
}

# Six claims of one source, all created at once: one download on each node that has one, and the others are
# created from its snapshot. A claim that is created later, and is larger, costs none either.
test_claims_of_one_source_are_filled_by_one_download() {
    local n sum
    with_populators
    allow_populators
    server 'dd if=/dev/urandom of=disk bs=1M count=64 2>/dev/null'
    sum=$(inside server 'sha256sum </www/disk')
    http_source disk disk "sha256: '${sum%% *}', cache: node"
    for n in {1..6}; do from_source "disk-$n" 128Mi disk; done
    for n in {1..6}; do pod "user-$n" -n node-1 "disk-$n:/data"; done
    for n in {1..6}; do
        ready "pod/user-$n"
        is "the object of claim $n" "$(inside "user-$n" 'sha256sum </data/disk.img')" "$sum"
    done
    is "the downloads" "$(downloads)" 1
    from_source larger 256Mi disk
    pod larger -n node-1 larger:/data
    ready pod/larger
    is "the object of a larger claim" "$(inside larger 'sha256sum </data/disk.img')" "$sum"
    is "its file system, which is larger" "$(inside larger 'df -m /data | awk "NR == 2 {print (\$2 > 150)}"')" 1
    is "the downloads" "$(downloads)" 1
    # Each volume is a copy of its own.
    inside user-1 'echo other >/data/disk.img'
    is "the object of claim 2" "$(inside user-2 'sha256sum </data/disk.img')" "$sum"
    # Another node receives it once more.
    from_source elsewhere 128Mi disk
    pod elsewhere -n node-2 elsewhere:/data
    ready pod/elsewhere
    is "the object on another node" "$(inside elsewhere 'sha256sum </data/disk.img')" "$sum"
    is "the downloads" "$(downloads)" 2
    # Without the snapshots, a claim is filled as before.
    k delete volumesnapshots -l slackwater.dev/cache >/dev/null
    from_source again 128Mi disk
    pod again -n node-1 again:/data
    ready pod/again
    is "the object again" "$(inside again 'sha256sum </data/disk.img')" "$sum"
    is "the downloads" "$(downloads)" 3
    # They are deleted with the source.
    gone httpsource/disk
    eventually 120 has_no_cache
    eventually 120 is_clean
}
downloads() { k logs server | grep -c 'response:20' || :; }
has_no_cache() { [ -z "$(k get volumesnapshots -l slackwater.dev/cache -o name)" ]; }
