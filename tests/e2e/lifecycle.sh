# Volumes from claim to deletion, as people use them.
# shellcheck shell=bash

test_every_file_system() {
    local fs
    for fs in ext4 xfs btrfs; do
        class "e2e-$fs" csi.storage.k8s.io/fstype $fs
        claim "$fs" 400Mi "e2e-$fs"
    done
    is "a claim before its pod" "$(get pvc/xfs .status.phase)" Pending
    pod first ext4:/ext4 xfs:/xfs btrfs:/btrfs
    ready pod/first
    for fs in ext4 xfs btrfs; do
        is "file system at /$fs" "$(inside first "awk '\$2 == \"/$fs\" {print \$3}' /proc/mounts")" $fs
        inside first "echo precious-$fs > /$fs/file; sync"
    done
    local node
    node=$(node_of first)
    gone pod/first
    pod second ext4:/ext4 xfs:/xfs btrfs:/btrfs
    ready pod/second
    is "the second pod's node" "$(node_of second)" "$node"
    for fs in ext4 xfs btrfs; do
        is "what the first pod wrote" "$(inside second "cat /$fs/file")" precious-$fs
    done
}

test_a_raw_block_volume() {
    MODE=Block claim raw 64Mi
    pod first raw:/dev/raw
    ready pod/first
    is "bytes of the device" "$(inside first 'blockdev --getsize64 /dev/raw')" 67108864
    inside first 'printf slack-water | dd of=/dev/raw bs=512 seek=100000 conv=fsync 2>/dev/null'
    gone pod/first
    pod second raw:/dev/raw
    ready pod/second
    is "what the first pod wrote" "$(inside second 'dd if=/dev/raw bs=512 skip=100000 count=1 2>/dev/null | head -c 11')" slack-water
}

test_volumes_that_live_as_long_as_their_pod() {
    apply <<END
apiVersion: v1
kind: Pod
metadata: {name: short}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: "docker.io/library/busybox:1.35.0", command: [sleep, "100000"], volumeMounts: [{name: generic, mountPath: /generic}, {name: inline, mountPath: /inline}]}
  volumes:
  - name: generic
    ephemeral: {volumeClaimTemplate: {spec: {storageClassName: slackwater, accessModes: [ReadWriteOnce], resources: {requests: {storage: 100Mi}}}}}
  - name: inline
    csi: {driver: $DRIVER, fsType: ext4, volumeAttributes: {size: 64Mi}}
END
    ready pod/short
    inside short 'echo a > /generic/file; echo b > /inline/file'
    is "mounts of the driver in the pod" "$(inside short 'grep -c "^/dev/loop.* /\(generic\|inline\) " /proc/mounts')" 2
    is "volumes on the pool" "$(pool_of "$(number_of "$(node_of short)")" volumes | wc -l)" 2
    gone pod/short
    # (a check after each test shows whether something is left)
}

test_late_binding_knows_the_room() {
    has_capacity() { [ "$(kubectl -n $SYSTEM get csistoragecapacities -o json | grep -c '"storageClassName": "slackwater"')" = "$(nodes)" ]; }
    eventually 120 has_capacity
    note "one CSIStorageCapacity for each node: $(kubectl -n $SYSTEM get csistoragecapacities -o jsonpath='{range .items[?(@.storageClassName=="slackwater")]}{.capacity} {end}')"
    claim giant 900Ti
    pod giant giant:/v
    told() { k get events --field-selector involvedObject.name=giant -o jsonpath='{.items[*].message}' | grep -q 'enough free storage'; }
    eventually 120 told
    note "the scheduler says: $(k get events --field-selector involvedObject.name=giant,reason=FailedScheduling -o jsonpath='{.items[0].message}')"
    is "the claim" "$(get pvc/giant .status.phase)" Pending
    claim fits 100Mi
    pod fits fits:/v
    ready pod/fits
}

test_growth_while_mounted() {
    class e2e-xfs csi.storage.k8s.io/fstype xfs
    claim data 400Mi e2e-xfs
    pod user data:/v
    ready pod/user
    inside user 'echo precious > /v/file'
    local before after
    before=$(inside user "df -k /v | awk 'NR == 2 {print \$2}'")
    k patch pvc data -p '{"spec":{"resources":{"requests":{"storage":"1Gi"}}}}' >/dev/null
    until_field pvc/data .status.capacity.storage 1Gi
    after=$(inside user "df -k /v | awk 'NR == 2 {print \$2}'")
    [ "$after" -gt $((before + 500000)) ] || fail "df said $before KiB, then $after" || return 1
    note "df: $before KiB, then $after KiB, in the same pod"
    is "the file" "$(inside user 'cat /v/file')" precious
}

test_growth_while_no_pod_uses_it() {
    class e2e-ext4 csi.storage.k8s.io/fstype ext4
    claim data 400Mi e2e-ext4
    pod first data:/v
    ready pod/first
    inside first 'echo precious > /v/file; sync'
    local before after
    before=$(inside first "df -k /v | awk 'NR == 2 {print \$2}'")
    gone pod/first
    k patch pvc data -p '{"spec":{"resources":{"requests":{"storage":"1Gi"}}}}' >/dev/null
    until_field pvc/data '.status.conditions[?(@.type=="FileSystemResizePending")].status' True
    pod second data:/v
    ready pod/second
    until_field pvc/data .status.capacity.storage 1Gi
    after=$(inside second "df -k /v | awk 'NR == 2 {print \$2}'")
    [ "$after" -gt $((before + 500000)) ] || fail "df said $before KiB, then $after" || return 1
    note "df: $before KiB, then $after KiB, in the pod that came after the growth"
    is "the file" "$(inside second 'cat /v/file')" precious
}

test_attributes_change() {
    kubectl apply -f - >/dev/null <<END
apiVersion: storage.k8s.io/v1
kind: VolumeAttributesClass
metadata: {name: e2e-wipe, labels: {slackwater-e2e: "yes"}}
driverName: $DRIVER
parameters: {wipe: zero}
END
    claim data 100Mi
    pod user data:/v
    ready pod/user
    k patch pvc data -p '{"spec":{"volumeAttributesClassName":"e2e-wipe"}}' >/dev/null
    until_field pvc/data .status.currentVolumeAttributesClassName e2e-wipe
    has "the volume's record" "$(node_exec "$(number_of "$(node_of user)")" sh -c 'cat /var/lib/slackwater/pool/volumes/*/record.json' | tr -d ' ')" '"wipe":"zero"'
}

test_one_pod_alone() {
    ACCESS=ReadWriteOncePod claim data 100Mi
    pod first data:/v
    ready pod/first
    pod second data:/v
    told() { k get events --field-selector involvedObject.name=second -o jsonpath='{.items[*].message}' | grep -q 'ReadWriteOncePod'; }
    eventually 60 told
    is "the second pod" "$(get pod/second .status.phase)" Pending
    gone pod/first
    ready pod/second
    note "the second pod runs after the first has gone"
}

test_a_stateful_set() {
    apply <<END
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  replicas: 3
  serviceName: db
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: db}}}]
      securityContext: {runAsUser: 1000, fsGroup: 2000}
      containers:
      - {name: main, image: "docker.io/library/busybox:1.35.0", command: [sh, -c, "hostname >> /v/log; trap exit TERM; sleep 100000 & wait"], volumeMounts: [{name: v, mountPath: /v}]}
  volumeClaimTemplates:
  - metadata: {name: v}
    spec: {storageClassName: slackwater, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
END
    k rollout status --timeout="$WAIT" statefulset/db >/dev/null
    local i on
    on=$(k get pods -l app=db -o jsonpath='{.items[*].spec.nodeName}')
    note "nodes: $on"
    is "different nodes" "$(tr ' ' '\n' <<<"$on" | sort -u | wc -l)" "$(nodes)"
    k scale --replicas=0 statefulset/db >/dev/null
    k wait --for=delete --timeout="$WAIT" pod -l app=db >/dev/null
    k scale --replicas=3 statefulset/db >/dev/null
    k rollout status --timeout="$WAIT" statefulset/db >/dev/null
    for i in 0 1 2; do
        is "starts of db-$i, written by user 1000" "$(inside db-$i 'cat /v/log' | grep -c "^db-$i\$")" 2
    done
    is "group of the files" "$(inside db-0 'stat -c %g /v/log')" 2000
    gone statefulset/db
}

# The router writes it into annotations of the content object, and may write nothing else there.
what_it_reached_is_noted() {
    local content as="--as=system:serviceaccount:$SYSTEM:slackwater-controller" said
    content=volumesnapshotcontent/$(get volumesnapshot/snap .status.boundVolumeSnapshotContentName)
    eventually 60 has_level "$content"
    is "the level at its content" "$(get "$content" '.metadata.annotations.slackwater\.dev/level')" filesystem
    kubectl get validatingadmissionpolicy slackwater-snapshot-notes >/dev/null 2>&1 || return 0
    kubectl annotate "$content" --overwrite --dry-run=server slackwater.dev/level=x "$as" >/dev/null
    said=$(kubectl annotate "$content" --dry-run=server e2e=x "$as" 2>&1) && { fail "another annotation is allowed"; return 1; }
    has "another annotation" "$said" "changes only annotations that begin with"
    said=$(kubectl label "$content" --dry-run=server e2e=x "$as" 2>&1) && { fail "a label is allowed"; return 1; }
    has "a label" "$said" "nothing of a snapshot's content but annotations"
}
has_level() { [ -n "$(get "$1" '.metadata.annotations.slackwater\.dev/level')" ]; }

test_clone_snapshot_and_a_larger_restore() {
    class e2e-xfs csi.storage.k8s.io/fstype xfs
    claim data 400Mi e2e-xfs
    pod user data:/v
    ready pod/user
    inside user 'echo before > /v/file' # not synced, and in the cut nevertheless
    snapshot snap data
    what_it_reached_is_noted
    inside user 'echo after > /v/file'
    claim copy 400Mi e2e-xfs PersistentVolumeClaim/data
    claim restored 800Mi e2e-xfs VolumeSnapshot/snap
    pod reader copy:/copy restored:/restored
    ready pod/reader
    is "the snapshot's restore" "$(inside reader 'cat /restored/file')" before
    is "the clone" "$(inside reader 'cat /copy/file')" after
    [ "$(inside reader "df -k /restored | awk 'NR == 2 {print \$2}'")" -gt 700000 ] || fail "the restore isn't larger" || return 1
    note "the restore has $(inside reader "df -h /restored | awk 'NR == 2 {print \$2}'")"
    inside reader 'echo changed > /copy/file; echo changed > /restored/file'
    is "the source" "$(inside user 'cat /v/file')" after
    is "the nodes of source and copies" "$(node_of reader)" "$(node_of user)"
    # A source may be deleted before its copies.
    gone pod/user
    gone pvc/data
    is "the restore, its source deleted" "$(inside reader 'cat /restored/file')" changed
    gone volumesnapshot/snap
}

test_the_router_may_change_only_its_label_of_a_node() {
    local as="--as=system:serviceaccount:$SYSTEM:slackwater-controller"
    kubectl get validatingadmissionpolicy slackwater-node-labels >/dev/null 2>&1 || { note "no router in this installation"; exit 77; }
    kubectl label node "$NODE_1" --overwrite --dry-run=server "topology.$DRIVER/home=x" "$as" >/dev/null
    note "its own label: allowed"
    local said
    said=$(kubectl label node "$NODE_1" --dry-run=server e2e=x "$as" 2>&1) && { fail "another label is allowed"; return 1; }
    has "another label" "$said" "changes only labels that begin with"
    said=$(kubectl taint node "$NODE_1" --dry-run=server e2e=x:NoSchedule "$as" 2>&1) && { fail "a taint is allowed"; return 1; }
    has "a taint" "$said" "changes nothing of a node but its own labels"
    for what in "get secrets" "create pods --subresource=exec" "create pods" "delete nodes"; do
        # shellcheck disable=SC2086
        said=$(kubectl auth can-i $what --all-namespaces "$as" 2>/dev/null) && { fail "it may $what everywhere"; return 1; }
        is "may $what everywhere" "$said" no
    done
}
