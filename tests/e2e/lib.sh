# Functions that the tests share; sourced, not run. Tests check results with `is`, `has` and the exit codes
# of kubectl.
# shellcheck shell=bash disable=SC2034 # variables are for the scripts that source this
set -euo pipefail

E2E=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TARGET=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-$E2E/../../target}")
LOGS=${E2E_LOGS:-$TARGET/e2e-logs}
DRIVER=csi.slackwater.dev
SYSTEM=slackwater # the namespace of the driver's pods
# The timeout for everything that ends by itself. Only something that hangs reaches it.
WAIT=${E2E_WAIT:-300s}

# The cluster: `cluster` is the laboratory of tests/cluster, `kind` a cluster of tests/kind.
# shellcheck source=tests/cluster/adapter.sh
. "$E2E/../${E2E_CLUSTER:-cluster}/adapter.sh"
NODE_1=$(node_name 1) NODE_2=$(node_name 2)

# shellcheck source=/dev/null
. "$E2E/load.sh"

note() { printf '       %s\n' "$*"; }
fail() { printf '       FAILED: %s\n' "$*"; return 1; }

# is WHAT GOT EXPECTED
is() {
    [ "$2" = "$3" ] || fail "$1 is '$2', expected '$3'" || return 1
    note "$1: $2"
}
# has WHAT TEXT PART
has() {
    [[ $2 == *"$3"* ]] || fail "$1 is '$2', expected '...$3...'" || return 1
    note "$1: ...$3..."
}
# eventually SECONDS COMMAND...: until it succeeds
eventually() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || { "$@"; return; }
        sleep 1
    done
}

k() { kubectl --namespace "$NS" "$@"; }
apply() { k apply -f - >/dev/null; }
get() { k get "$1" -o "jsonpath={$2}"; }
ready() { k wait --for=condition=Ready --timeout="$WAIT" "$@" >/dev/null; }
gone() { k delete --wait --timeout="$WAIT" "$@" >/dev/null; }
until_field() { k wait --for="jsonpath={$2}=$3" --timeout="$WAIT" "$1" >/dev/null; } # OBJECT FIELD VALUE
inside() { k exec "$1" -- sh -c "$2"; } # POD SCRIPT
nodes() { kubectl get nodes -o name | wc -l; }
pool_of() { node_exec "$1" sh -c "ls /var/lib/slackwater/pool/$2" 2>/dev/null; }
number_of() { node_list | awk -v name="$1" '$2 == name {print $1}'; }
running() { node_list | awk '$3 == "running" {print $1}'; }
two_nodes() { [ "$(nodes)" -ge 2 ] || { note "one node alone"; exit 77; }; }
# The driver's processes, by their command lines.
AGENT='^/usr/local/bin/slackwater serve .*--role=(node|all)'
ROUTER='^/usr/local/bin/slackwater serve .*--role=controller'
# ("slackwater guard" until it runs, and in older releases)
GUARD='^/usr/local/bin/slackwater(-guard| guard)'
# The pool that a node reports, and its state.
pool_id() { node_exec "$1" sh -c "grep -o '\"id\": *\"[^\"]*\"' /var/lib/slackwater/pool/pool.json | head -1 | cut -d '\"' -f 4"; }
health_of() { kubectl get pool "$1" -o 'jsonpath={.status.health}'; }
until_health() { kubectl wait --for="jsonpath={.status.health}=$2" --timeout="$WAIT" "pool/$1" >/dev/null && note "the pool of node $3 is $2: $(kubectl get pool "$1" -o 'jsonpath={.status.message}')"; } # POOL HEALTH NODE
node_of() { get "pod/$1" .spec.nodeName; }

# claim NAME SIZE [CLASS] [SOURCE_KIND/NAME]; labels in LABELS, modes in ACCESS and MODE
claim() {
    local source=
    case ${4:-} in
    VolumeSnapshot/*) source="dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: ${4#*/}}" ;;
    PersistentVolumeClaim/*) source="dataSource: {kind: PersistentVolumeClaim, name: ${4#*/}}" ;;
    esac
    apply <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $1, labels: {${LABELS:-of: test}}}
spec:
  storageClassName: ${3:-slackwater}
  accessModes: [${ACCESS:-ReadWriteOnce}]
  volumeMode: ${MODE:-Filesystem}
  resources: {requests: {storage: $2}}
  $source
END
}

# pod NAME [-n NODE] [-c COMMAND] CLAIM:/PATH...: a path below /dev is a raw block volume. The text
# in ANNOTATIONS becomes the pod's.
pod() {
    local name=$1 select='' command='sleep 100000' mounts='' devices='' volumes='' n=0
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        -n) select="nodeSelector: {kubernetes.io/hostname: $2}"; shift ;;
        -c) command=$2; shift ;;
        *)
            case $1 in
            *:/dev/*) devices+="{name: v$n, devicePath: ${1#*:}}, " ;;
            *) mounts+="{name: v$n, mountPath: ${1#*:}}, " ;;
            esac
            volumes+="{name: v$n, persistentVolumeClaim: {claimName: ${1%%:*}}}, "
            n=$((n + 1))
            ;;
        esac
        shift
    done
    apply <<END
apiVersion: v1
kind: Pod
metadata: {name: $name, annotations: {${ANNOTATIONS:-}}}
spec:
  terminationGracePeriodSeconds: 1
  $select
  containers:
  - name: main
    image: docker.io/library/busybox:1.35.0
    command: [sh, -c, "trap exit TERM; ($(sed 's/[\\"]/\\&/g' <<<"$command")) & wait"]
    volumeMounts: [${mounts%, }]
    volumeDevices: [${devices%, }]
  volumes: [${volumes%, }]
END
}

# stateful_set REPLICAS COMMAND: a StatefulSet `db` whose pods prefer node 2, each with a claim at /v, of the
# class in CLASS. They run the command at their start.
stateful_set() {
    apply <<END
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  replicas: $1
  podManagementPolicy: Parallel
  serviceName: db
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, preference: {matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [$NODE_2]}]}}]}}
      containers:
      - {name: main, image: "docker.io/library/busybox:1.35.0", command: [sh, -c, "$2; trap exit TERM; sleep 100000 & wait"], volumeMounts: [{name: v, mountPath: /v}]}
  volumeClaimTemplates:
  - metadata: {name: v}
    spec: {storageClassName: ${CLASS:-slackwater}, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
END
    k rollout status --timeout="$WAIT" statefulset/db >/dev/null
}

# class NAME KEY VALUE...: a StorageClass; deleted at the end of the run
class() {
    local name=$1 parameters=''
    shift
    while [ $# -gt 0 ]; do parameters+="$1: \"$2\", "; shift 2; done
    kubectl apply -f - >/dev/null <<END
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: $name, labels: {slackwater-e2e: "yes"}}
provisioner: $DRIVER
allowVolumeExpansion: true
volumeBindingMode: WaitForFirstConsumer
parameters: {${parameters%, }}
END
}

# snapshot_of NAME CLAIM: requests a snapshot, without waiting
snapshot_of() {
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec: {volumeSnapshotClassName: slackwater, source: {persistentVolumeClaimName: $2}}
END
}
# snapshot NAME CLAIM: requests a snapshot, and waits until it is ready
snapshot() {
    snapshot_of "$1" "$2"
    until_field "volumesnapshot/$1" .status.readyToUse true
}

# A group snapshot of the claims with a label `set`.
groups_version() { kubectl api-versions | sed -n 's/^groupsnapshot.storage.k8s.io.//p' | sort | tail -1; }
group_of() { # NAME LABEL_VALUE [CLASS]: requests it, without waiting
    apply <<END
apiVersion: groupsnapshot.storage.k8s.io/$(groups_version)
kind: VolumeGroupSnapshot
metadata: {name: $1}
spec: {volumeGroupSnapshotClassName: ${3:-slackwater}, source: {selector: {matchLabels: {set: $2}}}}
END
}
group() { # NAME LABEL_VALUE [CLASS]
    group_of "$@"
    ready_group "$1"
}
# Waits until it is ready and has the objects of its members, which snapshot-controller creates one after the
# other.
ready_group() {
    until_field "volumegroupsnapshot/$1" .status.readyToUse true
    eventually 60 members_told "$1"
}
members_told() {
    local content told made
    content=$(get "volumegroupsnapshot/$1" .status.boundVolumeGroupSnapshotContentName) || return 1
    made=$(get "volumegroupsnapshotcontent/$content" '.status.volumeSnapshotInfoList[*].snapshotHandle' | wc -w)
    told=$(members "$1" | awk 'NF == 3' | wc -l)
    [ "$made" -gt 0 ] && [ "$told" = "$made" ] || fail "group $1 has $made members, and $told objects of members"
}
# The members of a group: name, claim, time.
members() {
    k get volumesnapshots -o "jsonpath={range .items[?(@.status.volumeGroupSnapshotName==\"$1\")]}{.metadata.name} {.spec.source.persistentVolumeClaimName} {.status.creationTime}{\"\\n\"}{end}"
}

# The leading pod: of a sidecar, by the name of its Lease, or of the routers.
leader() {
    local holder pod
    holder=$(kubectl -n $SYSTEM get leases --no-headers -o custom-columns=N:.metadata.name,H:.spec.holderIdentity | awk -v lease="$1" '$1 ~ lease {print $2}')
    for pod in $(kubectl -n $SYSTEM get pods -l app.kubernetes.io/component=controller -o 'jsonpath={.items[*].metadata.name}'); do
        [[ $holder == *$pod* ]] && { echo "$pod"; return; }
    done
    fail "no pod of the controller holds the lease like $1: $holder" >&2
}

# Replaces one router, so that they are on two nodes again, for the tests that follow.
spread_routers() {
    kubectl -n $SYSTEM delete "$(kubectl -n $SYSTEM get pods -l app.kubernetes.io/component=controller -o name | head -1)" >/dev/null
    kubectl -n $SYSTEM rollout status --timeout="$WAIT" deployment >/dev/null
}

# Checks that nothing of the driver is left: objects, records, files, devices, freezes.
nothing_left() {
    eventually 120 no_objects || return 1
    local n
    for n in $(running); do eventually 60 bare "$n" || return 1; done
    note "no PersistentVolume, VolumeSnapshotContent, VolumeAttachment; no file on any pool, no loop device on one, nothing journalled as frozen"
}
no_objects() {
    local left
    left=$(kubectl get pv,volumesnapshotcontents,volumegroupsnapshotcontents,volumeattachments -o name 2>/dev/null) || return 1
    [ -z "$left" ] || fail "left: $left"
}
bare() {
    local left
    left=$(node_exec "$1" sh -c '
        cd /var/lib/slackwater/pool && find volumes snapshots trash -mindepth 1 2>/dev/null
        own=$(stat -c %d .)
        losetup --noheadings --raw --output NAME,BACK-FILE | grep " /var/lib/slackwater/pool/" || true
        find /run/slackwater/state/freezes -type f 2>/dev/null || true')
    [ -z "$left" ] || fail "left on node $1: $left"
}

# After a failure, writes logs and descriptions of objects into a folder.
collect() {
    local into=$1 n pod
    mkdir -p "$into"
    kubectl get pods,pvc,volumesnapshots,volumegroupsnapshots,events -A -o wide >"$into/objects.txt" 2>&1 || :
    kubectl get pv,volumesnapshotcontents,volumegroupsnapshotcontents,volumeattachments,csinodes,nodes,csistoragecapacities,pools -A -o yaml >"$into/objects.yaml" 2>&1 || :
    kubectl -n "$NS" describe pods,pvc,volumesnapshots,volumegroupsnapshots >"$into/describe.txt" 2>&1 || :
    for pod in $(kubectl -n $SYSTEM get pods -o name); do
        kubectl -n $SYSTEM logs "$pod" --all-containers --prefix --tail=3000 >"$into/${pod#pod/}.log" 2>&1 || :
        kubectl -n $SYSTEM logs "$pod" --all-containers --prefix --previous --tail=500 >"$into/${pod#pod/}.previous.log" 2>/dev/null || :
    done
    for n in $(running); do
        node_exec "$n" sh -c 'losetup --list; cat /proc/self/mountinfo; find /var/lib/slackwater' >"$into/node-$n.txt" 2>&1 || :
    done
    note "logs: $into"
}
