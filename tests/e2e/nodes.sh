# The life of nodes: power cuts with volumes in use.
# shellcheck shell=bash

ready_node() { kubectl wait --for=condition=Ready --timeout="$WAIT" "node/$1" >/dev/null; }
driver_on() { kubectl get csinode "$1" -o 'jsonpath={.spec.drivers[*].name}' | grep -q $DRIVER; }

test_a_node_loses_power_and_returns() {
    [ "$(nodes)" -ge 2 ] || { note "one node alone: the API server is on it"; exit 77; }
    claim there 100Mi
    claim here 100Mi
    pod there -n node-2 there:/v
    pod here -n node-1 here:/v
    ready pod/there pod/here
    inside there 'echo precious > /v/file; sync'
    snapshot before there
    claim doomed 100Mi
    pod doomed -n node-2 doomed:/v
    ready pod/doomed
    gone pod/doomed
    "$CLUSTER/node" stop 2
    kubectl wait --for=condition=Ready=Unknown --timeout="$WAIT" node/node-2 >/dev/null
    note "node 2 is off, and the scheduler knows"
    apply <<END
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: later}
spec: {volumeSnapshotClassName: slackwater, source: {persistentVolumeClaimName: there}}
END
    k delete pvc doomed --wait=false >/dev/null
    local doomed
    doomed=$(kubectl get pv -o "jsonpath={.items[?(@.spec.claimRef.name==\"doomed\")].metadata.name}")
    # Volumes of the other node are undisturbed meanwhile.
    snapshot other here
    claim new 100Mi
    pod new new:/v
    ready pod/new
    is "a new volume's node" "$(node_of new)" node-1
    sleep 20
    is "the snapshot of a volume there waits" "$(get volumesnapshot/later .status.readyToUse)" false
    is "the volume that is to be deleted there waits" "$(kubectl get pv "$doomed" -o 'jsonpath={.status.phase}')" Released
    "$CLUSTER/node" start 2
    ready_node node-2
    eventually 180 driver_on node-2
    until_field volumesnapshot/later .status.readyToUse true
    kubectl wait --for=delete --timeout="$WAIT" "pv/$doomed" >/dev/null
    note "both are done after node 2 has returned"
    k delete pod there --force --grace-period=0 >/dev/null 2>&1
    pod again -n node-2 there:/v
    ready pod/again
    is "the file" "$(inside again 'cat /v/file')" precious
    claim restored 100Mi slackwater VolumeSnapshot/before
    pod restored restored:/v
    ready pod/restored
    is "the restore of before" "$(inside restored 'cat /v/file')" precious
    is "its node" "$(node_of restored)" node-2
}

test_a_restore_goes_where_its_source_is() {
    [ "$(nodes)" -ge 2 ] || { note "one node alone"; exit 77; }
    claim source 100Mi
    pod source -n node-2 source:/v
    ready pod/source
    inside source 'echo precious > /v/file; sync'
    snapshot snap source
    # Many pods make node 2 the one that the scheduler likes least.
    local i
    for i in 1 2 3 4 5 6; do pod "crowd-$i" -n node-2; done
    claim restored 100Mi slackwater VolumeSnapshot/snap
    pod reader restored:/v
    ready pod/reader
    is "the reader's node" "$(node_of reader)" node-2
    is "the file" "$(inside reader 'cat /v/file')" precious
}
