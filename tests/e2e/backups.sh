# What backup programs do, call by call: none of them runs here. Their data movers are pods that tar a volume.
# shellcheck shell=bash

# The namespace of a backup program, which is deleted also after a failure.
program_namespace() {
    PROGRAM=$NS-program
    kubectl delete namespace "$PROGRAM" --ignore-not-found --wait --timeout="$WAIT" >/dev/null
    kubectl create namespace "$PROGRAM" >/dev/null
    trap 'kubectl delete namespace "$PROGRAM" --ignore-not-found --wait --timeout="$WAIT" >/dev/null' EXIT
}
# Runs a function of this library in the namespace of the program.
in_program() { local NS=$PROGRAM; "$@"; }

patch() { k patch "$1" --type=merge -p "$2" >/dev/null; }
sum_of() { inside "$1" "cd $2 && find . -type f ! -path './lost+found/*' -exec sha256sum {} + | sort | sha256sum | cut -d ' ' -f 1"; }

# Velero takes the snapshot of a claim over into its own namespace: a second content with the same handle, and the
# first one deleted with its snapshot but without the data.
expose_as_velero() { # SNAPSHOT
    local content handle size
    content=$(get "volumesnapshot/$1" .status.boundVolumeSnapshotContentName)
    handle=$(get "volumesnapshotcontent/$content" .status.snapshotHandle)
    size=$(get "volumesnapshot/$1" .status.restoreSize)
    in_program apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec: {volumeSnapshotClassName: slackwater, source: {volumeSnapshotContentName: $PROGRAM-$1}}
END
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: $PROGRAM-$1}
spec:
  volumeSnapshotRef: {name: $1, namespace: $PROGRAM, uid: $(kubectl -n "$PROGRAM" get volumesnapshot "$1" -o jsonpath='{.metadata.uid}')}
  source: {snapshotHandle: "$handle"}
  deletionPolicy: Delete
  driver: $DRIVER
  volumeSnapshotClassName: slackwater
END
    patch "volumesnapshotcontent/$content" '{"spec": {"deletionPolicy": "Retain"}}'
    gone "volumesnapshot/$1"
    kubectl delete --ignore-not-found --wait --timeout="$WAIT" "volumesnapshotcontent/$content" >/dev/null
    in_program until_field "volumesnapshot/$1" .status.readyToUse true
    in_program claim "$1" "$size" slackwater "VolumeSnapshot/$1"
    in_program pod "$1" "$1:/data"
    in_program ready "pod/$1"
}
clean_as_velero() { # NAME
    in_program gone "pod/$1" "pvc/$1"
    in_program k delete --ignore-not-found --wait --timeout="$WAIT" "volumesnapshot/$1" >/dev/null
}

# Velero fills a claim that a pod waits for: a claim of its own on the node that the scheduler has selected, whose
# volume is bound to the user's claim when it is full.
restore_as_velero() { # CLAIM SIZE ARCHIVE
    local node='' volume uid version
    eventually 60 is_selected "$1"
    node=$(get "pvc/$1" '.metadata.annotations.volume\.kubernetes\.io/selected-node')
    in_program apply <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $1, annotations: {volume.kubernetes.io/selected-node: $node}}
spec: {storageClassName: slackwater, accessModes: [ReadWriteOnce], resources: {requests: {storage: $2}}}
END
    in_program pod "fill-$1" -n "$node" "$1:/data"
    in_program ready "pod/fill-$1"
    in_program k exec -i "fill-$1" -- tar -C /data -xf - <"$3"
    volume=$(in_program get "pvc/$1" .spec.volumeName)
    patch "pv/$volume" '{"spec": {"persistentVolumeReclaimPolicy": "Retain"}}'
    in_program gone "pod/fill-$1" "pvc/$1"
    uid=$(get "pvc/$1" .metadata.uid) version=$(get "pvc/$1" .metadata.resourceVersion)
    patch "pvc/$1" "{\"metadata\": {\"annotations\": {\"pv.kubernetes.io/bind-completed\": null, \"pv.kubernetes.io/bound-by-controller\": null}}, \"spec\": {\"volumeName\": \"$volume\"}}"
    patch "pv/$volume" "{\"metadata\": {\"labels\": {\"velero.io/dynamic-pv-restore\": \"$1\"}}, \"spec\": {\"claimRef\": {\"apiVersion\": \"v1\", \"kind\": \"PersistentVolumeClaim\", \"namespace\": \"$NS\", \"name\": \"$1\", \"uid\": \"$uid\", \"resourceVersion\": \"$version\"}}}"
    until_field "pvc/$1" .status.phase Bound
    patch "pv/$volume" '{"spec": {"persistentVolumeReclaimPolicy": "Delete"}}'
}
is_selected() { [ -n "$(get "pvc/$1" '.metadata.annotations.volume\.kubernetes\.io/selected-node')" ]; }

test_velero_moves_the_data_of_claims_and_restores_them() {
    program_namespace
    local claim sums=''
    claim a 64Mi
    claim b 64Mi
    pod app a:/a b:/b
    ready pod/app
    inside app 'for v in a b; do dd if=/dev/urandom of=/$v/data bs=1M count=8; done; sync' 2>/dev/null
    for claim in a b; do
        sums+="$claim $(sum_of app "/$claim") "
        snapshot "velero-$claim" "$claim"
        inside app "echo later > /$claim/later"
        expose_as_velero "velero-$claim"
        in_program k exec "velero-$claim" -- tar -C /data -cf - data >"$LOGS/$NS-$claim.tar"
        clean_as_velero "velero-$claim"
    done
    eventually 60 no_snapshots_at_all
    note "both snapshots were read from Velero's namespace, and are deleted"
    gone pod/app pvc/a pvc/b
    # The restore: a pod and its claims, which nothing else fills.
    for claim in a b; do
        apply <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $claim}
spec:
  storageClassName: slackwater
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
  selector: {matchLabels: {velero.io/dynamic-pv-restore: $claim}}
END
    done
    pod app a:/a b:/b
    for claim in a b; do restore_as_velero "$claim" 64Mi "$LOGS/$NS-$claim.tar"; done
    ready pod/app
    is "what was restored" "a $(sum_of app /a) b $(sum_of app /b) " "$sums"
    rm -f "$LOGS/$NS"-?.tar
}
no_snapshots_at_all() { [ -z "$(kubectl get volumesnapshotcontents -o name)" ] || fail "contents of snapshots are left"; }

test_volsync_copies_a_snapshot_with_a_cache() {
    claim data 64Mi
    pod app data:/v
    ready pod/app
    inside app 'dd if=/dev/urandom of=/v/file bs=1M count=8; sync' 2>/dev/null
    claim volsync-data-cache 64Mi
    local run sum
    for run in 1 2; do
        sum=$(sum_of app /v)
        snapshot volsync-data-src data
        claim volsync-data-src 64Mi slackwater VolumeSnapshot/volsync-data-src
        pod mover volsync-data-src:/data volsync-data-cache:/cache
        ready pod/mover
        is "what the mover of run $run reads" "$(sum_of mover /data)" "$sum"
        has "its node" "$(node_of mover)" "$(node_of app)"
        inside mover 'date > /cache/ran'
        gone pod/mover pvc/volsync-data-src volumesnapshot/volsync-data-src
        inside app 'date > /v/later'
    done
}

# CloudNativePG takes one snapshot of each volume of an instance between pg_backup_start and pg_backup_stop, and
# makes a replica of them on another node.
test_cloudnative_pg_makes_a_replica_of_snapshots() {
    two_nodes
    claim cluster-1 64Mi
    claim cluster-1-wal 64Mi
    pod cluster-1 -n "$NODE_1" cluster-1:/pgdata cluster-1-wal:/wal
    ready pod/cluster-1
    inside cluster-1 'dd if=/dev/urandom of=/pgdata/base bs=1M count=8; echo wal > /wal/1; sync' 2>/dev/null
    snapshot_of backup cluster-1
    snapshot_of backup-wal cluster-1-wal
    until_field volumesnapshot/backup .status.readyToUse true
    until_field volumesnapshot/backup-wal .status.readyToUse true
    is "errors of the snapshots" "$(k get volumesnapshots -o jsonpath='{.items[*].status.error.message}')" ""
    claim cluster-2 64Mi slackwater VolumeSnapshot/backup
    claim cluster-2-wal 64Mi slackwater VolumeSnapshot/backup-wal
    # Its instances have a required anti-affinity between nodes; here the pod names the other node.
    pod cluster-2 -n "$NODE_2" cluster-2:/pgdata cluster-2-wal:/wal
    ready pod/cluster-2
    is "the node of the replica" "$(node_of cluster-2)" "$NODE_2"
    is "its data" "$(sum_of cluster-2 /pgdata) $(sum_of cluster-2 /wal)" "$(sum_of cluster-1 /pgdata) $(sum_of cluster-1 /wal)"
}
