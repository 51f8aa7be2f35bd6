# The life of nodes: power cuts, reboots, drains, and other machines, with volumes in use.
# shellcheck shell=bash

ready_node() { kubectl wait --for=condition=Ready --timeout="$WAIT" "node/$1" >/dev/null; }
off_node() { # N: powers it off, and waits until the scheduler knows
    node_stop "$1"
    kubectl wait --for=condition=Ready=Unknown --timeout="$WAIT" "node/$(node_name "$1")" >/dev/null
    note "node $1 is off, and the scheduler knows"
}
on_node() { # N: boots it, and waits until it serves
    node_start "$1"
    ready_node "$(node_name "$1")"
    eventually 180 driver_on "$(node_name "$1")"
}
driver_on() { kubectl get csinode "$1" -o 'jsonpath={.spec.drivers[*].name}' | grep -q $DRIVER; }
volume_of() { kubectl get pv -o "jsonpath={.items[?(@.spec.claimRef.name==\"$1\")].metadata.name}"; } # CLAIM
detached() { ! kubectl get volumeattachments -o 'jsonpath={.items[*].spec.source.persistentVolumeName}' | grep -q "$1"; } # PV
pv_gone() { kubectl wait --for=delete --timeout="$WAIT" "pv/$1" >/dev/null; }
home_of() { kubectl get node "$1" -o "jsonpath={.metadata.labels['topology\.csi\.slackwater\.dev/home']}"; }
events_of() { kubectl get events -A --field-selector "involvedObject.name=$1,reason=$2" -o 'jsonpath={.items[*].message}'; } # OBJECT REASON
has_event() { [ -n "$(events_of "$1" "$2")" ]; }
router_is_back() { kubectl -n $SYSTEM rollout status --timeout="$WAIT" deployment >/dev/null; }

test_a_node_loses_power_and_returns() {
    two_nodes
    claim there 100Mi
    claim here 100Mi
    pod there -n "$NODE_2" there:/v
    pod here -n "$NODE_1" here:/v
    ready pod/there pod/here
    inside there 'echo precious > /v/file; sync'
    snapshot before there
    claim doomed 100Mi
    pod doomed -n "$NODE_2" doomed:/v
    ready pod/doomed
    gone pod/doomed
    off_node 2
    snapshot_of later there
    local doomed
    doomed=$(volume_of doomed)
    k delete pvc doomed --wait=false >/dev/null
    # Volumes of the other node are not affected.
    snapshot other here
    claim new 100Mi
    pod new new:/v
    ready pod/new
    is "a new volume's node" "$(node_of new)" "$NODE_1"
    sleep 20
    is "the snapshot of a volume there waits" "$(get volumesnapshot/later .status.readyToUse)" false
    is "the volume that is to be deleted there waits" "$(kubectl get pv "$doomed" -o 'jsonpath={.status.phase}')" Released
    on_node 2
    until_field volumesnapshot/later .status.readyToUse true
    pv_gone "$doomed"
    note "both complete after node 2 has returned"
    k delete pod there --force --grace-period=0 >/dev/null 2>&1
    pod again -n "$NODE_2" there:/v
    ready pod/again
    is "the file" "$(inside again 'cat /v/file')" precious
    claim restored 100Mi slackwater VolumeSnapshot/before
    pod restored restored:/v
    ready pod/restored
    is "the restore of before" "$(inside restored 'cat /v/file')" precious
    is "its node" "$(node_of restored)" "$NODE_2"
}

# The kubelet and the driver of a node can use its volumes again without any other process.
test_a_node_reboots_while_no_controller_runs() {
    two_nodes
    local uid
    claim data 100Mi
    MODE=Block claim raw 64Mi
    apply <<END
apiVersion: v1
kind: Pod
metadata: {name: app}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: $NODE_2}
  containers:
  - {name: main, image: "docker.io/library/busybox:1.35.0", command: [sh, -c, "trap exit TERM; sleep 100000 & wait"], volumeMounts: [{name: data, mountPath: /v}, {name: inline, mountPath: /inline}], volumeDevices: [{name: raw, devicePath: /dev/raw}]}
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: data}}
  - {name: raw, persistentVolumeClaim: {claimName: raw}}
  - name: inline
    csi: {driver: $DRIVER, fsType: ext4, volumeAttributes: {size: 64Mi}}
END
    ready pod/app
    inside app 'echo precious > /v/file; echo short > /inline/file; printf slack-water | dd of=/dev/raw bs=512 seek=1000 conv=fsync 2>/dev/null; sync'
    uid=$(get pod/app .metadata.uid)
    trap 'kubectl -n $SYSTEM scale --replicas=2 deployment --all >/dev/null' EXIT
    kubectl -n $SYSTEM scale --replicas=0 deployment --all >/dev/null
    kubectl -n $SYSTEM wait --for=delete --timeout="$WAIT" pod -l app.kubernetes.io/component=controller >/dev/null
    note "no router and no sidecar runs"
    node_stop 2
    node_start 2
    restarted() { [ "$(get pod/app '.status.containerStatuses[0].restartCount')" -ge 1 ] && [ "$(get pod/app '.status.conditions[?(@.type=="Ready")].status')" = True ]; }
    eventually 240 restarted
    is "the pod is the same" "$(get pod/app .metadata.uid)" "$uid"
    is "the file" "$(inside app 'cat /v/file')" precious
    is "the block volume" "$(inside app 'dd if=/dev/raw bs=512 skip=1000 count=1 2>/dev/null | head -c 11')" slack-water
    is "controllers meanwhile" "$(kubectl -n $SYSTEM get pods -l app.kubernetes.io/component=controller -o name | wc -l)" 0
    kubectl -n $SYSTEM scale --replicas=2 deployment --all >/dev/null
    trap - EXIT
    router_is_back
    snapshot after data
    note "a snapshot is created once a controller runs again"
}

test_a_node_is_drained() {
    two_nodes
    local idle
    stateful_set 1 'hostname >> /v/log; sync'
    is "its node" "$(node_of db-0)" "$NODE_2"
    claim idle 64Mi
    pod idle -n "$NODE_2" idle:/v
    ready pod/idle
    gone pod/idle
    trap 'kubectl uncordon "$NODE_2" >/dev/null' EXIT
    kubectl drain "$NODE_2" --ignore-daemonsets --delete-emptydir-data --force --timeout="$WAIT" >/dev/null 2>&1
    pending() { [ "$(get pod/db-0 .status.phase)" = Pending ] && [ -z "$(get pod/db-0 .spec.nodeName)" ]; }
    eventually 120 pending
    note "the pod waits for its node; the controller's pods are on nodes: $(kubectl -n $SYSTEM get pods -l app.kubernetes.io/component=controller -o 'jsonpath={.items[*].spec.nodeName}')"
    # The driver stays on a drained node, whose volumes can still be snapshotted and deleted.
    snapshot meanwhile v-db-0
    idle=$(volume_of idle)
    gone pvc/idle
    pv_gone "$idle"
    claim new 64Mi
    pod new new:/v
    ready pod/new
    is "a new volume's node" "$(node_of new)" "$NODE_1"
    kubectl uncordon "$NODE_2" >/dev/null
    trap - EXIT
    k rollout status --timeout="$WAIT" statefulset/db >/dev/null
    is "its node again" "$(node_of db-0)" "$NODE_2"
    is "starts in its log" "$(inside db-0 'cat /v/log | wc -l')" 2
    spread_routers
}

# Another machine takes the name and the disks: it has the same home and volumes.
test_a_node_is_replaced_and_keeps_its_disks() {
    two_nodes
    local pool home
    claim there 100Mi
    pod there -n "$NODE_2" there:/v
    ready pod/there
    inside there 'echo precious > /v/file; sync'
    snapshot before there
    pool=$(pool_id 2) home=$(home_of "$NODE_2")
    node_stop 2
    # As an administrator marks a machine that is gone.
    kubectl delete node "$NODE_2" >/dev/null
    node_replace 2
    on_node 2
    is "its pool" "$(pool_id 2)" "$pool"
    is "its home" "$(home_of "$NODE_2")" "$home"
    k delete pod there --force --grace-period=0 --ignore-not-found >/dev/null 2>&1
    pod again -n "$NODE_2" there:/v
    ready pod/again
    is "the file" "$(inside again 'cat /v/file')" precious
    until_health "$pool" Healthy 2
    claim restored 100Mi slackwater VolumeSnapshot/before
    pod restored restored:/v
    ready pod/restored
    is "the restore" "$(inside restored 'cat /v/file')" precious
}

# Another machine takes the name, with disks of its own: no volume on the old disks counts as deleted, and
# none is created in its place, until an administrator marks the old pools as lost.
test_a_node_is_replaced_with_blank_disks() {
    two_nodes
    local pool home doomed there
    claim there 100Mi
    pod there -n "$NODE_2" there:/v
    claim here 100Mi
    pod here -n "$NODE_1" here:/v
    ready pod/there pod/here
    inside here 'echo precious > /v/file; sync'
    snapshot before there
    claim doomed 100Mi
    pod doomed -n "$NODE_2" doomed:/v
    ready pod/doomed
    gone pod/doomed
    doomed=$(volume_of doomed) there=$(volume_of there) pool=$(pool_id 2) home=$(home_of "$NODE_2")
    node_replace 2 --blank
    ready_node "$NODE_2"
    k delete pvc doomed --wait=false >/dev/null
    k delete volumesnapshot before --wait=false >/dev/null
    until_health "$pool" Unreachable 2
    eventually 120 has_event "$NODE_2" HomeConflict
    note "an event on the node: $(events_of "$NODE_2" HomeConflict)"
    sleep 15
    is "the label of the node" "$(home_of "$NODE_2")" "$home"
    is "the volume that is to be deleted waits" "$(kubectl get pv "$doomed" -o 'jsonpath={.status.phase}')" Released
    is "the volume in use" "$(kubectl get pv "$there" -o 'jsonpath={.status.phase}')" Bound
    is "snapshots that wait for their end" "$(kubectl get volumesnapshotcontents -o name | wc -l)" 1
    is "volumes on the new disk" "$(pool_of 2 volumes | wc -l)" 0
    kubectl patch pool "$pool" --type merge -p '{"spec":{"lost":true,"lostReason":"disk burnt"}}' >/dev/null
    until_health "$pool" Lost 2
    pv_gone "$doomed"
    contents_gone() { [ -z "$(kubectl get volumesnapshotcontents -o name)" ]; }
    eventually 120 contents_gone
    note "deletes that waited are complete"
    gone pod/there
    gone pvc/there
    pv_gone "$there"
    note "a volume in use as well, only by deleting objects"
    eventually 120 has_event "$NODE_2" HomeRelabelled
    note "an event on the node: $(events_of "$NODE_2" HomeRelabelled)"
    eventually 300 driver_on "$NODE_2"
    [ "$(home_of "$NODE_2")" != "$home" ] || fail "the node's home is the old one" || return 1
    claim new 100Mi
    pod new -n "$NODE_2" new:/v
    ready pod/new
    is "volumes on the new disk" "$(pool_of 2 volumes | wc -l)" 1
    is "the other node's file" "$(inside here 'cat /v/file')" precious
    kubectl delete pool "$pool" >/dev/null
}

# The application replicates its data, so that it can do without the volume of one replica. When the node returns,
# its disk still has that volume, which no pod uses, until a person decides about it.
test_a_replica_of_a_lost_node_is_created_again() {
    two_nodes
    local volume uid pool taint=node.kubernetes.io/out-of-service
    class replicated onNodeLost recreate
    trap 'kubectl uncordon "$NODE_1" "$NODE_2" >/dev/null 2>&1; kubectl taint node "$NODE_2" '$taint'- >/dev/null 2>&1; node_start 2 >/dev/null 2>&1' EXIT
    # Two replicas on node 1, and one on node 2.
    kubectl cordon "$NODE_2" >/dev/null
    CLASS=replicated stateful_set 2 'hostname >> /v/log; sync'
    kubectl uncordon "$NODE_2" >/dev/null
    kubectl cordon "$NODE_1" >/dev/null
    k scale --replicas=3 statefulset/db >/dev/null
    k rollout status --timeout="$WAIT" statefulset/db >/dev/null
    kubectl uncordon "$NODE_1" >/dev/null
    is "nodes of the replicas" "$(node_of db-0) $(node_of db-1) $(node_of db-2)" "$NODE_1 $NODE_1 $NODE_2"
    inside db-2 'echo precious > /v/file; sync'
    volume=$(volume_of v-db-2) uid=$(get pvc/v-db-2 .metadata.uid) pool=$(pool_id 2)
    off_node 2
    eventually 180 has_event v-db-2 NodeLostWaits
    note "an event on the claim: $(events_of v-db-2 NodeLostWaits)"
    sleep 20
    is "the claim while the node may return" "$(get pvc/v-db-2 .metadata.uid) $(get pvc/v-db-2 .status.phase)" "$uid Bound"
    kubectl taint node "$NODE_2" "$taint=nodeshutdown:NoExecute" >/dev/null
    created_again() { [ "$(get pvc/v-db-2 .metadata.uid)" != "$uid" ] && [ "$(get pvc/v-db-2 .status.phase)" = Bound ]; }
    eventually 400 created_again
    ready pod/db-2
    is "its new node" "$(node_of db-2)" "$NODE_1"
    is "starts in its log" "$(inside db-2 'cat /v/log | wc -l')" 1
    is "the file" "$(inside db-2 'ls /v/file 2>/dev/null | wc -l')" 0
    state_of() { kubectl get pv "$1" -o 'jsonpath={.status.phase} {.spec.persistentVolumeReclaimPolicy}'; }
    is "the old volume" "$(state_of "$volume")" "Released Retain"

    kubectl taint node "$NODE_2" "$taint-" >/dev/null
    on_node 2
    trap - EXIT
    until_health "$pool" Healthy 2
    sleep 30
    is "the old volume when its node is back" "$(state_of "$volume")" "Released Retain"
    is "volumes on its disk" "$(pool_of 2 volumes | wc -l)" 1
    # What docs/troubleshooting.md describes for volumes in quarantine.
    kubectl patch pv "$volume" --type json -p '[{"op":"remove","path":"/spec/claimRef"}]' >/dev/null
    apply <<END
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: rescued}
spec: {storageClassName: replicated, volumeName: $volume, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
END
    pod rescued -n "$NODE_2" rescued:/v
    ready pod/rescued
    is "the file" "$(inside rescued 'cat /v/file')" precious
    gone pod/rescued
    gone pvc/rescued
    is "it is kept again" "$(state_of "$volume")" "Released Retain"
    kubectl patch pv "$volume" --type merge -p '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}' >/dev/null
    pv_gone "$volume"
}

# The objects of a pool that is marked as lost can simply be deleted. If the pool returns, it is not used until
# an administrator removes the mark.
test_a_pool_is_lost_and_returns() {
    two_nodes
    local pool doomed handle snap content
    claim stays 100Mi
    pod stays -n "$NODE_2" stays:/v
    ready pod/stays
    inside stays 'echo precious > /v/file; sync'
    claim doomed 100Mi
    pod doomed -n "$NODE_2" doomed:/v
    ready pod/doomed
    gone pod/doomed
    snapshot snap stays
    doomed=$(volume_of doomed) pool=$(pool_id 2)
    # (Kubernetes deletes no volume that is attached, and detaches none of a node that is off for 6 min)
    eventually 120 detached "$doomed"
    handle=$(kubectl get pv "$doomed" -o 'jsonpath={.spec.csi.volumeHandle}')
    content=$(get volumesnapshot/snap .status.boundVolumeSnapshotContentName)
    snap=$(kubectl get volumesnapshotcontent "$content" -o 'jsonpath={.status.snapshotHandle}')
    trap 'kubectl patch pool '"$pool"' --type merge -p "{\"spec\":{\"lost\":false}}" >/dev/null; node_start 2' EXIT
    off_node 2
    k delete pod stays --force --grace-period=0 >/dev/null 2>&1
    k delete pvc doomed --wait=false >/dev/null
    k delete volumesnapshot snap --wait=false >/dev/null
    sleep 10
    is "the volume that is to be deleted waits" "$(kubectl get pv "$doomed" -o 'jsonpath={.status.phase}')" Released
    is "and the snapshot" "$(kubectl get volumesnapshotcontent "$content" -o name | wc -l)" 1
    kubectl patch pool "$pool" --type merge -p '{"spec":{"lost":true,"lostReason":"nobody finds it"}}' >/dev/null
    pv_gone "$doomed"
    kubectl wait --for=delete --timeout="$WAIT" "volumesnapshotcontent/$content" >/dev/null
    until_health "$pool" Lost 2
    on_node 2
    until_health "$pool" Quarantined 2
    eventually 300 detached "$(volume_of stays)"
    pod again -n "$NODE_2" stays:/v
    told() { k get events --field-selector involvedObject.name=again -o 'jsonpath={.items[*].message}' | grep -q 'marked as lost'; }
    eventually 120 told
    is "a pod that wants a volume of it" "$(get pod/again .status.phase)" Pending
    note "the event of its pod: $(k get events --field-selector involvedObject.name=again,reason=FailedAttachVolume -o 'jsonpath={.items[0].message}')"
    kubectl patch pool "$pool" --type merge -p '{"spec":{"lost":false}}' >/dev/null
    trap - EXIT
    until_health "$pool" Healthy 2
    ready pod/again
    is "the file" "$(inside again 'cat /v/file')" precious
    # Volumes and snapshots that counted as deleted still exist. Objects for their handles are created, so that
# they can be deleted.
    is "volumes on the disk" "$(pool_of 2 volumes | wc -l)" 2
    taken_back "$doomed" "$handle" "$snap"
}

# Creates a PersistentVolume and a VolumeSnapshot for a volume and a snapshot that no object names any more,
# and deletes them.
taken_back() { # PV VOLUME_HANDLE SNAPSHOT_HANDLE
    kubectl apply -f - >/dev/null <<END
apiVersion: v1
kind: PersistentVolume
metadata: {name: $1, annotations: {pv.kubernetes.io/provisioned-by: $DRIVER}}
spec:
  capacity: {storage: 100Mi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Delete
  storageClassName: slackwater
  claimRef: {namespace: $NS, name: doomed, uid: 00000000-0000-4000-8000-000000000000}
  csi: {driver: $DRIVER, volumeHandle: $2}
END
    pv_gone "$1"
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: $NS-back}
spec:
  deletionPolicy: Delete
  driver: $DRIVER
  source: {snapshotHandle: $3}
  volumeSnapshotRef: {namespace: $NS, name: back}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: back}
spec: {source: {volumeSnapshotContentName: $NS-back}}
END
    until_field volumesnapshot/back .status.readyToUse true
    gone volumesnapshot/back
    note "a volume and a snapshot that nothing named were taken back by their handles, and deleted"
}

test_a_restore_goes_where_its_source_is() {
    two_nodes
    claim source 100Mi
    pod source -n "$NODE_2" source:/v
    ready pod/source
    inside source 'echo precious > /v/file; sync'
    snapshot snap source
    # Because of many pods on node 2, the scheduler prefers every other node.
    local i
    for i in 1 2 3 4 5 6; do pod "crowd-$i" -n "$NODE_2"; done
    claim restored 100Mi slackwater VolumeSnapshot/snap
    pod reader restored:/v
    ready pod/reader
    is "the reader's node, of $(nodes)" "$(node_of reader)" "$NODE_2"
    is "the file" "$(inside reader 'cat /v/file')" precious
    # In one round: the scheduler selected a node once, and the claim was not returned to it.
    is "tries to provision it" "$(kubectl get events -n "$NS" --field-selector involvedObject.name=restored,reason=Provisioning -o 'jsonpath={.items[*].count}')" 1
    is "those that failed" "$(events_of restored ProvisioningFailed)" ""
}
